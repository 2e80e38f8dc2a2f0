"""The page in a real browser: what a click or a key shows is what the model computed."""

import re
import threading

import pytest
import torch

from minitransformer import Tokenizer, get_attention_weights
from minitransformer.lab import trace as look
from minitransformer.lab.page import example, exhibit, page
from minitransformer.lab.run import make_server
from tests.model.models import make

PROMPT = "Ann sees Ann sees"
MINUS = "\u2212"
BYTES = Tokenizer.bytes()
IDS = torch.tensor([BYTES.eos_id, *BYTES.encode(PROMPT)])
N = len(IDS)
KINDS = {
    "rotary": dict(position="rotary", qk_norm=True),
    "alibi": dict(position="alibi", pattern=["window", "full"], window=4, n_kv_heads=2, softcap=2.0),
    "shaw": dict(position="shaw", n_kv_heads=1),
    "transformer_xl": dict(position="transformer_xl"),
    "linear": dict(position="none", kind="elu", n_kv_heads=2),
}


def build(kind: str):
    model = make(vocab_size=257, **KINDS[kind])
    for block in model.blocks:
        block.attention.qkv.weight.data *= 3  # attention that is not even
    return model


@pytest.fixture(scope="module")
def models():
    return {kind: build(kind) for kind in KINDS}


@pytest.fixture(scope="module")
def files(models, tmp_path_factory):
    """A page of each kind of model; only the first has integrated gradients."""
    place = tmp_path_factory.mktemp("lab")
    for kind, model in models.items():
        shown = [exhibit(model, BYTES, PROMPT, kind, explain=2 if kind == "rotary" else 0), example()]
        (place / f"{kind}.html").write_text(page(shown), encoding="utf-8")
    return {kind: place / f"{kind}.html" for kind in models}


def close(shown, values, digits: int) -> bool:
    """Are numbers as written on the page the values, rounded to so many digits?"""
    written = [float(text.replace(MINUS, "-")) for text in shown]
    assert all(re.fullmatch(rf"{MINUS}?\d+\.\d{{{digits}}}", text) for text in shown), shown
    values = torch.as_tensor(values).tolist()
    return len(written) == len(values) and all(
        abs(a - b) <= 0.5001 * 10**-digits + 1e-5 * abs(b) for a, b in zip(written, values, strict=True)
    )


def table(view, name: str) -> list[list[str]]:
    """The texts of a table's body, row by row."""
    return view.eval_on_selector(
        f"#{name} tbody", "body => [...body.rows].map(row => [...row.cells].map(cell => cell.innerText.trim()))"
    )


def head_of(layer, number: int):
    return number // (len(layer.q) // len(layer.k))


def test_click_a_token_and_go_through_the_steps(browser_page, files, models):
    view, model = browser_page(files["rotary"]), models["rotary"]
    seen = look.trace(model, IDS)
    tokens = view.get_by_role("option")
    assert tokens.count() == N
    assert tokens.nth(N - 1).get_attribute("aria-selected") == "true"
    view.get_by_role("option", name="“␣”, token 5 of 18").click()
    query = 4
    view.get_by_role("radio", name="Layer 1", exact=True).check()
    view.get_by_role("radio", name="Head 2", exact=True).check()
    layer, weights = seen.layers[1], get_attention_weights(model, IDS[None], 1, 2)[0]
    assert tokens.nth(query).get_attribute("aria-selected") == "true"
    for i in range(N):
        said = tokens.nth(i).locator("small").inner_text()
        assert said == "hidden" if i > query else close([said], [weights[query, i]], 2)

    for letter, vector in (("q", layer.q), ("k", layer.k), ("v", layer.v)):
        strips = table(view, "step-table")[query]
        if letter == "q":
            numbers = view.locator("#step-query .vector").inner_text().split()
        else:
            numbers = strips[1 if letter == "k" else 2].split()
        assert close(numbers, vector[2, query], 2), letter

    view.get_by_role("button", name="Next →").click()
    assert view.get_by_role("tab", name="2 Score").get_attribute("aria-selected") == "true"
    scores = layer.k[2] @ layer.q[2, query]
    assert close([row[2] for row in table(view, "step-table")], scores, 2)

    view.get_by_role("tab", name="3 Scale, softmax").click()
    rows = table(view, "step-table")[:-1]
    assert close([row[1] for row in rows], scores, 2)
    assert close([row[2] for row in rows], scores / 8**0.5, 2)
    assert close([row[4] for row in rows[: query + 1]], weights[query, : query + 1], 2)
    assert {row[4] for row in rows[query + 1 :]} == {"hidden by the mask"}
    view.get_by_label("compare with no division").check()
    unscaled = scores[: query + 1].softmax(-1)
    assert close([row[5] for row in table(view, "step-table")[: query + 1]], unscaled, 2)
    assert not torch.allclose(unscaled, weights[query, : query + 1], atol=0.05)

    view.get_by_role("button", name="Next →").click()
    rows = table(view, "step-table")
    assert close(rows[-1][3].split(), layer.output[2, query], 2)
    assert close(rows[0][3].split(), weights[query, 0] * layer.v[2, 0], 2)
    assert view.get_by_role("button", name="Next →").is_disabled()


@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_are_the_model_s(kind, browser_page, files, models):
    """Every head, some queries, of every kind of attention."""
    view, model = browser_page(files[kind]), models[kind]
    seen, cap = look.trace(model, IDS), model.config.attention.softcap
    places = [(layer, head, query) for layer in range(2) for head in range(4) for query in (0, 7, N - 1)]
    shown = view.evaluate(
        """places => places.map(([layer, head, query]) => [2, 3].map(step => {
            show({ layer, head, query, step });
            return [...document.querySelector("#step-table tbody").rows].map(row =>
                [...row.cells].map(cell => cell.innerText.trim()));
        }))""",
        places,
    )
    for (number, head, query), (weighed, mixed) in zip(places, shown, strict=True):
        layer = seen.layers[number]
        allowed = layer.allowed[query]
        raw = layer.k[head_of(layer, head)] @ layer.q[head, query]
        columns = [raw]
        if kind != "linear":
            columns.append(raw / layer.q.shape[-1] ** 0.5)
            if cap:
                columns.append(cap * torch.tanh(columns[-1] / cap))
            if layer.bias is not None:
                columns += [layer.bias[head, query], columns[-1] + layer.bias[head, query]]
        for place, expected in enumerate(columns, start=1):
            assert close([row[place] for row in weighed[:N]], expected, 2), (number, head, query, place)
        found = [row[-1] for row, seen_by in zip(weighed[:N], allowed, strict=True) if seen_by]
        assert close(found, layer.weights[head, query, allowed], 2)
        assert close(mixed[-1][3].split(), layer.output[head, query], 2)
        assert (mixed[-1][2] != "") == (kind == "shaw")


def test_keys_move_queries_heads_layers_and_steps(browser_page, files):
    view = browser_page(files["rotary"])
    state = lambda: view.evaluate("[x.layer, x.head, x.query, x.step]")  # noqa: E731
    assert state() == [0, 0, N - 1, 0]
    for key, expected in [
        ("ArrowLeft", [0, 0, N - 2, 0]),
        ("ArrowRight", [0, 0, N - 1, 0]),
        ("ArrowRight", [0, 0, N - 1, 0]),
        ("]", [0, 1, N - 1, 0]),
        ("[", [0, 0, N - 1, 0]),
        ("[", [0, 0, N - 1, 0]),
        ("}", [1, 0, N - 1, 0]),
        ("[", [0, 3, N - 1, 0]),
        ("]", [1, 0, N - 1, 0]),
        ("{", [0, 0, N - 1, 0]),
        ("3", [0, 0, N - 1, 2]),
    ]:
        view.keyboard.press(key)
        assert state() == expected, key
    assert "hidden by the mask" not in view.locator("#step-table").inner_text()  # the last query sees all
    view.keyboard.press("c")
    assert view.get_by_label("compare with no division").is_checked()

    # Roving focus: one stop for all tokens, and arrows take it along.
    view.locator("#tokens [tabindex='0']").focus()
    view.keyboard.press("Home")
    view.keyboard.press("ArrowRight")
    assert view.evaluate("document.activeElement === document.querySelectorAll('#tokens [role=option]')[1]")
    assert view.locator("#tokens [tabindex='0']").count() == 1
    view.locator("#overview [tabindex='0']").focus()
    view.keyboard.press("ArrowDown")
    view.keyboard.press("ArrowRight")
    assert state() == [1, 1, 1, 2]
    assert view.evaluate("document.activeElement.ariaLabel") == "layer 1, head 1"
    view.get_by_role("tab", name="3 Scale").focus()
    view.keyboard.press("ArrowRight")
    assert state() == [1, 1, 1, 3]
    for place, key in (("head", "ArrowLeft"), ("views", "ArrowRight"), ("exhibits", "ArrowRight")):
        view.locator(f"#{place} input:checked").focus()
        before = view.evaluate("document.activeElement.ariaLabel")
        view.keyboard.press(key)
        assert view.evaluate(f"document.activeElement.closest('#{place}') !== null")
        assert view.evaluate("document.activeElement.checked && document.activeElement.ariaLabel") != before
    assert view.evaluate("x.name") == "Textbook example"


def test_everything_is_reached_by_the_tab_key_and_has_a_name(browser_page, files):
    view = browser_page(files["rotary"])
    reached = []
    for _ in range(80):
        view.keyboard.press("Tab")
        found = view.evaluate(
            "(e => e === document.body ? null : [e.id || e.name || e.role || e.className || e.tagName, e.ariaLabel "
            "|| e.innerText || e.getAttribute('aria-labelledby') || e.labels?.[0]?.innerText])(document.activeElement)"
        )
        if found is None:
            break
        reached.append(found)
    names = [name for name, _ in reached]
    for wanted in ("exhibits", "option", "layer", "head", "tab-0", "step", "next", "views", "map", "radio", "targets"):
        assert wanted in names, names
    assert all(label for _, label in reached), reached


def test_the_map_names_query_key_and_weight(browser_page, files, models):
    view, seen = browser_page(files["alibi"]), look.trace(models["alibi"], IDS)
    canvas, cell = view.locator("#map"), view.locator("#cell")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    margin, side = view.evaluate("[map.margin, map.side]")
    at = lambda i: margin + (i + 0.5) * side  # noqa: E731

    def said():
        return cell.inner_text()

    canvas.hover(position={"x": at(2), "y": at(4)})
    weight = seen.weights[0, 0, 4, 2]
    assert said().startswith("query “␣” (5), key “n” (3): weight ")
    assert close([re.search(r"weight (\S+),", said())[1]], [weight], 3)
    bias = re.search(r"bias (\S+),", said())[1]
    layer = seen.layers[0]
    assert close([bias], [layer.bias[0, 4, 2]], 2)
    score = 2 * torch.tanh(layer.q[0, 4] @ layer.k[0, 2] / 8**0.5 / 2) + layer.bias[0, 4, 2]
    assert close([said().split()[-1]], [score], 2)
    canvas.hover(position={"x": at(9), "y": at(4)})
    assert said().endswith("hidden by the mask")
    canvas.hover(position={"x": at(0), "y": at(4)})
    assert said().endswith("hidden by the mask")  # the window of 4 does not reach it
    view.mouse.click(box["x"] + at(3), canvas.bounding_box()["y"] + at(6))
    assert view.evaluate("x.query") == 6
    canvas.focus()
    view.keyboard.press("ArrowUp")
    view.keyboard.press("ArrowRight")
    assert said().startswith("query “s” (6), key “s” (5)") or said().startswith("query “s” (6), key “␣” (5)")
    view.keyboard.press("Enter")
    assert view.evaluate("x.query") == 5
    assert view.evaluate("x.cell") == [5, 4]
    for name in ("scores before the softmax", "positional bias", "mask", "rollout, all layers"):
        drawn = canvas.screenshot()
        view.get_by_role("radio", name=f"Show {name}", exact=True).check()
        assert canvas.screenshot() != drawn, name
    assert close([said().split("rollout ")[1]], [look.rollout(seen.weights)[5, 4]], 3)


def test_heads_are_sorted_by_each_measure_and_chosen(browser_page, files, models):
    view, model = browser_page(files["rotary"]), models["rotary"]
    seen = look.trace(model, IDS)
    found = look.head_measures(seen.weights, IDS) | {"noise": look.induction_on_noise(model, BYTES.eos_id, 257)}
    columns = ["previous", "itself", "first", "repeated", "induction", "noise", "distance", "entropy"]
    for place, name in enumerate(columns, start=1):
        header = view.locator("#measures th button").nth(place - 1)
        header.click()
        assert close([row[place] for row in table(view, "measures")], found[name].flatten().sort(descending=True)[0], 2)
        header.click()
        assert view.locator("#measures th[aria-sort]").get_attribute("aria-sort") == "ascending"
        rows = table(view, "measures")
        assert close([row[place] for row in rows], found[name].flatten().sort()[0], 2)
        assert view.evaluate("document.activeElement.dataset.key") == name
    lowest = rows[0][0]
    view.locator("#measures tbody button").first.click()
    assert view.evaluate("`${x.layer}.${x.head}`") == lowest


def test_predictions_and_attributions_are_the_model_s(browser_page, files, models):
    view, model = browser_page(files["rotary"]), models["rotary"]
    query = 9
    view.get_by_role("option").nth(query).click()
    with torch.no_grad():
        lens = look.logit_lens(model, look.trace(model, IDS).streams)[:, query].softmax(-1)
    rows = table(view, "expect")
    assert [row[0] for row in rows] == ["embedding", "after layer 0", "after layer 1"]
    for row, p in zip(rows, lens, strict=True):
        shown = [float(text.split()[-2].replace("<", "")) / 100 for text in row[1:6]]
        assert shown == pytest.approx(p.topk(5).values.tolist(), abs=0.0051 if shown[0] >= 0.0995 else 0.00051)
        assert float(row[6].split()[-2].replace("<", "")) / 100 == pytest.approx(float(p[IDS[query + 1]]), abs=0.0051)
    grid = view.eval_on_selector("#lens", "t => [...t.rows[3].cells].map(c => c.innerText)")
    likeliest = model(IDS[None])[0].argmax(-1).tolist()
    vocabulary = view.evaluate("x.vocabulary")
    assert grid[1:] == [vocabulary[str(i)] for i in likeliest]

    targets = view.locator("#targets input")
    assert targets.count() == 3  # two likely ones, and the one that came
    for place in range(3):
        targets.nth(place).check()
        target = view.evaluate("x.explained[x.query].targets[x.target]")
        expected, at, start = look.integrated_gradients(model, IDS[: query + 1], torch.tensor([target]), BYTES.eos_id)
        rows = table(view, "flow")
        assert close([row[3] for row in rows], expected[0], 2)
        assert close([row[2] for row in rows], look.rollout(look.trace(model, IDS).weights)[query, : query + 1], 2)
        said = view.locator("#flow-sum").inner_text()
        assert close(re.findall(rf"(?:sum to|is|be) ({MINUS}?\d+\.\d\d)", said), [expected.sum(), at[0], start[0]], 2)
    assert target == IDS[query + 1]


def test_the_textbook_example_is_a_page_of_the_same_lab(browser_page, files):
    view = browser_page(files["linear"])
    view.get_by_role("radio", name="Textbook example").check()
    assert view.get_by_role("option", name="“arrow”, token 5 of 5, weight 0.80").is_visible()
    assert view.locator("#summary").inner_text() == "“flies” looks at “arrow” 0.80, “flies” 0.18, “time” 0.01"
    view.get_by_role("tab", name="3 Scale, softmax").click()
    view.get_by_label("compare with no division").check()
    rows = table(view, "step-table")
    assert [row[1] for row in rows[:5]] == ["0.00", "6.00", "0.00", "0.00", "9.00"]
    assert [row[4] for row in rows[:5]] == ["0.01", "0.18", "0.01", "0.01", "0.80"]
    assert [row[5] for row in rows[:5]] == ["0.00", "0.05", "0.00", "0.00", "0.95"]
    for part in ("measures-part", "lens-part", "flow-part"):
        assert not view.locator(f"#{part}").is_visible()
    view.get_by_role("radio", name="linear").check()
    assert view.locator("#lens-part").is_visible()
    assert view.get_by_role("tab", name="3 Normalise").is_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_hostile_prompt_is_text(browser_page, models, tmp_path, scheme):
    prompt = "</script><b>&amp;\"'🦉\x00\x1b\u202e\u2028<img src=x onerror=alert(1)>"
    file = tmp_path / "lab.html"
    tokenizer = Tokenizer.train_characters([prompt + "e\u0301 \n"])
    file.write_text(page([exhibit(models["rotary"], tokenizer, prompt, "<i>x", explain=0)]), encoding="utf-8")
    view = browser_page(file, width=360, scheme=scheme)
    shown = view.eval_on_selector_all("#tokens [role=option]", "all => all.map(o => o.firstChild.textContent)")
    escaped = {"\x00": "⟨00⟩", "\x1b": "⟨1B⟩", "\u202e": "⟨U+202E⟩", "\u2028": "⟨U+2028⟩", " ": "␣"}
    assert shown == ["⟨start⟩", *(escaped.get(c, c) for c in prompt)]
    assert view.locator("img, main b b, i x").count() == 0
    assert "<i>x" in view.title()
    background = view.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (int(re.findall(r"\d+", background)[0]) < 60) == (scheme == "dark")


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_wider_than_a_phone(kind, browser_page, files):
    view = browser_page(files[kind], width=360)
    for exhibit_number in (0, 1):
        view.evaluate(f"chooseExhibit({exhibit_number}); if (!compare) toggleCompare()")
        for step in range(4):
            view.evaluate(f"show({{step: {step}}})")
            assert view.evaluate("document.documentElement.scrollWidth") == 360
            wide = view.evaluate(
                "[...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll, #overview, #tip, .sr') && "
                "e.offsetParent && e.getBoundingClientRect().right > 361).map(e => e.id || e.className || e.tagName)"
            )
            assert wide == []


def test_served_pages_take_other_prompts(browser_page, models):
    def answer(prompt: str) -> str:
        try:
            return page([exhibit(models["rotary"], BYTES, prompt, "mine", explain=0), example()], served=True)
        except ValueError as error:
            return page([example()], served=True, error=str(error))

    with make_server(0, "Ann", answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        view = browser_page(f"http://localhost:{server.server_port}/")
        view.get_by_label("Prompt").fill("Bob & <i>")
        view.keyboard.press("Enter")
        view.wait_for_url("**/?prompt=*")
        assert view.get_by_role("option").count() == 10
        assert view.get_by_label("Prompt").input_value() == "Bob & <i>"
        view.get_by_label("Prompt").fill("")
        view.get_by_role("button", name="Look").click()
        assert view.get_by_role("alert").inner_text().startswith("prompt is empty")
        server.shutdown()
