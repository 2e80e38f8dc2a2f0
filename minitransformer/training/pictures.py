"""Attention weights as a picture."""

from io import BytesIO

import torch
from PIL import Image, ImageDraw
from torch import Tensor

MOST = 4  # layers, and heads of each
SIDE, GAP, LINE = 192, 8, 14  # of a map, between maps, of a line of text, in pixels
TITLE = "rows: queries, columns: keys; black is 1 (square root of the weight)"


def attention_picture(weights: list[Tensor]) -> bytes:
    """Up to four layers, first and last among them, a row each, and their first four heads, as a PNG file.

    weights: (1, H, T, T) of each layer, as `Transformer` returns them.
    """
    layers = sorted({round(i * (len(weights) - 1) / (MOST - 1)) for i in range(MOST)})
    heads = min(MOST, weights[0].shape[1])
    side = max(1, SIDE // weights[0].shape[-1]) * weights[0].shape[-1]  # whole pixels for each weight
    width = max(GAP + heads * (side + GAP), 7 * len(TITLE))
    picture = Image.new("L", (width, LINE + GAP + len(layers) * (LINE + side + GAP)), 255)
    draw = ImageDraw.Draw(picture)
    draw.text((GAP, 2), TITLE, fill=0)
    for row, layer in enumerate(layers):
        for head in range(heads):
            left, top = GAP + head * (side + GAP), LINE + GAP + row * (LINE + side + GAP)
            draw.text((left, top), f"layer {layer} head {head}", fill=0)
            shades = (255 * (1 - weights[layer][0, head].float().sqrt())).round().to(torch.uint8).cpu().numpy()
            picture.paste(Image.fromarray(shades).resize((side, side), Image.Resampling.NEAREST), (left, top + LINE))
            draw.rectangle((left - 1, top + LINE - 1, left + side, top + LINE + side), outline=128)
    file = BytesIO()
    picture.save(file, "PNG", optimize=True)
    return file.getvalue()
