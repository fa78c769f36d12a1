"""The report in a real browser: every view, colour and control; nothing but text comes out of a run; nothing leaves."""

import copy
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from kit.browser import Browser, chromium
from kit.stale_engine import StaleEngine
from kit.support import fit, tiny_module, tiny_prompts, tiny_tokenizer
from kit.vision import PROCESSORS, picture_rows, vision_model
from lightning.pytorch.loggers import CSVLogger
from torch.optim import AdamW

from lightning_rl import PromptDataModule
from lightning_rl.audit import SignalLedger
from lightning_rl.callbacks import OPSM, NoEOSMask
from lightning_rl.glossary import entry_of
from lightning_rl.recording import Recording
from lightning_rl.reporting import RunReport, write_report
from lightning_rl.reporting.run_files import read_folder
from lightning_rl.rollout import Rollout

ROWS = 16
MODES = ("none", "trainer", "engine", "difference", "ratio", "clip", "advantage", "entropy", "taken", "gradient")
MADE_OF_TOKENS = (
    "policy/entropy",
    "policy/ratio_max",
    "policy/clip_fraction_high",
    "policy/clip_fraction_low",
    "kl/old",
)
MADE_OF_TOKENS += ("advantage/mean", "staleness/mean", "reward/task", "reward/parity_reward")
MADE_OF_TOKENS += ("length/mean", "length/truncated")
INJECTIONS = (
    "<script>window.hit=1</script>",
    "</script><script>window.hit=1</script>",
    "<img src=x onerror=window.hit=1>",
    "<svg/onload=window.hit=1>",
    '"><script>window.hit=1</script>',
    "'><img src=x onerror=window.hit=1>",
    "<iframe srcdoc='<script>parent.hit=1</script>'></iframe>",
    "<a href='javascript:window.hit=1'>click</a>",
    "javascript:window.hit=1",
    "<style>*{display:none}</style>",
    "<link rel=stylesheet href=http://127.0.0.1:9/x.css>",
    "<meta http-equiv=refresh content='0;url=http://127.0.0.1:9/'>",
    "<base href=http://127.0.0.1:9/>",
    "<form action=http://127.0.0.1:9/><input type=submit></form>",
    "{{ 7*7 }}{% for x in y %}",
    "${window.hit=1}`+window.hit+`",
    "<!--<script>window.hit=1//-->",
    "]]><![CDATA[<script>window.hit=1</script>",
    "\u2028window.hit=1\u2029\x00\x1b[2J\u202egnp.exe",
    "<template><img src=x onerror=window.hit=1></template>&lt;b&gt;<b>bold</b>",
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture(autouse=True)
def _quiet_page(browser: Browser) -> Iterator[None]:
    """Every test ends without a word on the console, and without an address that is no file."""
    browser.said.clear()
    browser.requests.clear()
    browser.size(1280)
    yield
    assert browser.said == []
    assert [url for url in browser.requests if not url.startswith(("file:", "about:", "data:", "blob:"))] == []


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run over the same four prompts, with a ledger and a correction."""
    folder = tmp_path_factory.mktemp("run")
    module = tiny_module(tokenizer=tiny_tokenizer(), minibatches_per_rollout=2, optimizer=partial(AdamW, lr=0.02))
    rows = [[2 + place, 3] for place in range(4)]
    callbacks = [NoEOSMask(), OPSM(1e-3), SignalLedger(), RunReport(1)]
    logger = CSVLogger(folder, name="", version="")
    fit(module, callbacks=callbacks, data=PromptDataModule(rows, 4), logger=logger, max_epochs=4)
    with (folder / "report" / "findings.jsonl").open("a") as lines:
        finding = {"check": "seeds", "culprit": "engine", "observed": "equal", "samples": [17], "positions": [0]}
        lines.write(json.dumps({"rollout": 1, "severity": "error", **finding}) + "\n")
    write_report([folder], folder / "report.html")
    return folder


def shown_figures(browser: Browser, selector: str) -> list[float]:
    found = browser.ask(f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => e.dataset.value)")
    return [float(text) for text in found]


@pytest.mark.nightly
def test_every_view_opens_from_its_link(browser: Browser, run: Path) -> None:
    assert browser.open(run / "report.html") < 30
    for view in ("flow", "findings", "rollout", "compare", "configuration", "curves"):
        browser.click(f'nav a[data-view="{view}"]')
        assert browser.ask("document.getElementById('main').textContent.length") > 60
        assert "cannot be shown" not in browser.ask("document.getElementById('main').textContent")


def test_a_run_that_ended_well_says_nothing_of_its_end(browser: Browser, run: Path) -> None:
    browser.open(run / "report.html")
    assert browser.ask("document.getElementById('end').checkVisibility()") is False


def test_every_value_of_every_curve_is_the_loggers(browser: Browser, run: Path) -> None:
    browser.open(run / "report.html")
    metrics = read_folder([run]).metrics
    assert browser.ask("RUN.metrics") == {
        name: [sorted(values), [values[step] for step in sorted(values)]] for name, values in metrics.items()
    }
    assert len(browser.ask("[...document.querySelectorAll('article.metric')].map((e) => e.dataset.metric)")) > 6
    browser.go("#metric?name=reward%2Ftask&step=3")
    assert shown_figures(browser, "#point") == [metrics["reward/task"][3]]
    text = browser.ask("document.getElementById('main').textContent")
    assert "weighted sum of the reward functions" in text and "rewarded rows" in text


@pytest.mark.nightly
@pytest.mark.parametrize("mode", MODES)
def test_every_colour_mode_colours(browser: Browser, run: Path, mode: str) -> None:
    browser.open(run / "report.html", "#rollout?rollout=3&colour=none")
    browser.click(f'button[data-mode="{mode}"]', drawn=False)
    browser.wait(f"""document.querySelector('button[data-mode="{mode}"]').getAttribute('aria-pressed') === 'true'""")
    colours = browser.ask("[...document.querySelectorAll('.t')].filter((e) => e.style.background).length")
    assert (colours == 0) if mode == "none" else (colours > 0) or mode == "clip"
    assert f"colour={mode}" in browser.ask("location.hash")


def test_samples_are_sorted_and_filtered(browser: Browser, run: Path) -> None:
    browser.open(run / "report.html", "#rollout?rollout=2")
    recording = Recording.load(run / "report" / "rollout-000002.json")
    rewards = recording.rollout.rewards[recording.rollout.rewarded].tolist()
    browser.choose("Layout", "1")
    browser.choose("Sort by", "reward")
    assert shown_figures(browser, "[data-what=reward]") == sorted(rewards, reverse=True)
    browser.choose("Order", "1")
    assert shown_figures(browser, "[data-what=reward]") == sorted(rewards)
    browser.choose("Sort by", "length")
    assert shown_figures(browser, "[data-what=tokens]") == sorted(recording.rollout.response_lengths.tolist())
    browser.choose("Order", "")
    browser.choose("Sort by", "mismatch")
    values = shown_figures(browser, "[data-what=mismatch]")
    assert values == sorted(values, reverse=True) and len(set(values)) > 4
    finishes = [sample["finish"] for sample in recording.header["samples"]]
    browser.choose("Finish", "length")
    assert len(shown_figures(browser, "[data-what=tokens]")) == finishes.count("length")
    browser.choose("Finish", "")
    browser.choose("Reward from", "1")
    assert len(shown_figures(browser, "[data-what=reward]")) == rewards.count(1.0)


def test_a_finding_leads_to_its_row(browser: Browser, run: Path) -> None:
    browser.open(run / "report.html", "#findings")
    browser.click("article.finding dd a")
    assert browser.ask("document.querySelector('article.asked').dataset.sample") == "17"
    assert browser.ask("document.querySelector('.t.selected').closest('article').dataset.sample") == "17"
    browser.choose("Only", "finding")
    assert browser.ask("[...document.querySelectorAll('article.sample')].map((e) => e.dataset.sample)") == ["17"]


def test_a_point_leads_to_the_tokens_that_moved_it(browser: Browser, run: Path) -> None:
    metrics = read_folder([run]).metrics
    browser.open(run / "report.html")
    browser.click('article[data-metric="kl/rollout"] h3 a')
    step = int(browser.ask("new URLSearchParams(location.hash.split('?')[1]).get('step')"))
    assert shown_figures(browser, "#recomputed")[0] == pytest.approx(metrics["kl/rollout"][step], rel=1e-5)
    shares = shown_figures(browser, "#moved-tokens .share")
    assert shares == sorted(shares, reverse=True) and 0 < sum(shares) <= 1 + 1e-9
    recording = Recording.load(run / "report" / f"rollout-{step // 2:06d}.json")
    rows = [row for microbatch in recording.header["plan"][step % 2] for row in microbatch]
    gap = (recording.tensors["pass/0/logprobs"] - recording.rollout.require("rollout_logprobs"))[rows].double()
    parts = torch.where(recording.rollout.valid_tokens[rows], gap.expm1() - gap, 0.0)
    assert shares[0] == pytest.approx(float(parts.max() / parts.sum()), rel=1e-4)
    row, place = divmod(int(parts.argmax()), parts.shape[1])
    sample = int(recording.rollout.sample_ids[rows[row]])
    browser.click("#moved-tokens a")
    assert browser.ask("location.hash").startswith(f"#rollout?rollout={step // 2}&sample={sample}&colour=difference")
    facts = browser.ask(
        "Object.fromEntries([...document.querySelectorAll('.panel dd')].map((e) => [e.dataset.fact, "
        "e.firstChild.dataset ? Number(e.firstChild.dataset.value) : e.textContent]))"
    )
    assert facts["sample"] == f"{sample}, token {place}"
    assert facts["trainer log-prob"] == float(recording.tensors["pass/0/logprobs"][rows[row], place])
    assert facts["engine log-prob"] == float(recording.rollout.require("rollout_logprobs")[rows[row], place])
    assert facts["advantage"] == float(recording.rollout.require("advantages")[rows[row], place])
    assert facts["gradient"] == float(recording.tensors["pass/0/gradient"][rows[row], place])
    assert facts["entropy, nats"] == float(recording.tensors["pass/0/entropy"][rows[row], place])


@pytest.mark.nightly
@pytest.mark.parametrize("metric", MADE_OF_TOKENS)
def test_what_a_point_is_made_of_is_the_point(browser: Browser, run: Path, metric: str) -> None:
    values = read_folder([run]).metrics[metric]
    browser.open(run / "report.html")
    for step in (0, 3, 7):
        browser.go(f"#metric?name={metric.replace('/', '%2F')}&step={step}")
        assert shown_figures(browser, "#recomputed")[0] == pytest.approx(values[step], rel=2e-5, abs=1e-9)


def test_the_ledger_flows(browser: Browser, run: Path) -> None:
    metrics = read_folder([run]).metrics
    browser.open(run / "report.html", "#flow?step=5&unit=tokens")
    figures = shown_figures(browser, "#ledger .number")
    assert figures[0] == metrics["ledger/tokens/sampled"][5] and figures[-1] == metrics["ledger/tokens/used"][5]
    taken = [values[5] for name, values in metrics.items() if name.startswith("ledger/tokens/")]
    assert sorted(figures) == sorted(taken)
    assert browser.ask("document.querySelectorAll('.stream .gone').length") >= 1
    (run / "bare").mkdir(exist_ok=True)
    for suffix in ("json", "safetensors"):
        (run / "bare" / f"rollout-000001.{suffix}").write_bytes(
            (run / "report" / f"rollout-000001.{suffix}").read_bytes()
        )
    write_report([run / "bare"], run / "bare" / "bare.html")
    browser.open(run / "bare" / "bare.html", "#flow")  # counted, where nothing was logged
    counted = shown_figures(browser, "#ledger .number")
    valid = sum(
        metrics["ledger/tokens/used"][step] * weight for step, weight in zip((2, 3), weights_of(run, 1), strict=True)
    )
    assert counted[-1] == pytest.approx(valid, rel=1e-6)


def weights_of(run: Path, number: int) -> list[float]:
    """Shares of the valid tokens of a rollout that each of its steps trains."""
    recording = Recording.load(run / "report" / f"rollout-{number:06d}.json")
    counts = [
        int(recording.rollout.valid_tokens[[row for part in step for row in part]].sum())
        for step in recording.header["plan"]
    ]
    return [count / sum(counts) for count in counts]


def test_two_rollouts_of_a_prompt_stand_beside_each_other(browser: Browser, run: Path) -> None:
    browser.open(run / "report.html", "#compare?left=0&right=3")
    left, right = (Recording.load(run / "report" / f"rollout-00000{number}.json") for number in (0, 3))
    for side, recording in enumerate((left, right)):
        prompt = left.rollout.prompt_ids[0]
        rows = (recording.rollout.prompt_ids == prompt).all(-1)
        assert len(shown_figures(browser, f"[data-side='{side}'] [data-what=tokens]")) == int(rows.sum()) == 4
    boxes = browser.ask("[...document.querySelectorAll('[data-side]')].map((e) => e.getBoundingClientRect().y)")
    assert boxes[0] == boxes[1]


def test_the_keyboard_suffices(browser: Browser, run: Path) -> None:
    browser.open(run / "report.html", "#metric?name=kl%2Frollout&step=5")
    browser.ask("document.querySelector('.chart[role=slider]').focus()")
    browser.press("ArrowLeft", drawn=True)
    assert "step=4" in browser.ask("location.hash")
    browser.press("ArrowLeft", drawn=True)
    assert "step=3" in browser.ask("location.hash")
    browser.go("#rollout?rollout=1")
    browser.press("8")
    browser.wait("location.hash.includes('colour=entropy')")
    browser.press("]", drawn=True)
    assert browser.ask("location.hash").startswith("#rollout?rollout=2&colour=entropy")
    browser.press("j")
    assert browser.ask("document.activeElement.tagName") == "ARTICLE"
    browser.click(".t", drawn=False)
    browser.press("ArrowRight")
    assert browser.ask("[...document.querySelectorAll('.t')].indexOf(document.activeElement)") == 1
    assert browser.ask("document.querySelector('.panel').hidden") is False
    browser.press("Escape")
    assert browser.ask("document.querySelector('.panel').hidden") is True
    browser.press("/")
    assert browser.ask("document.activeElement.type") == "search"


@pytest.mark.nightly
@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("dark", [False, True])
def test_every_view_fits_the_window(browser: Browser, run: Path, width: int, dark: bool) -> None:
    browser.size(width, dark=dark)
    for view in ("curves", "metric?name=kl%2Frollout", "flow", "findings", "rollout", "compare", "configuration"):
        browser.open(run / "report.html", f"#{view}")
        assert browser.ask("document.documentElement.scrollWidth") <= width, view
        assert browser.ask("document.documentElement.dataset.theme") == ("dark" if dark else "light")
    before = browser.ask("getComputedStyle(document.body.parentElement).backgroundColor")
    browser.click("#theme")
    assert browser.ask("getComputedStyle(document.body.parentElement).backgroundColor") != before


def test_every_view_is_in_sight_on_a_narrow_window(browser: Browser, run: Path) -> None:
    browser.size(400)
    browser.open(run / "report.html", "#configuration")
    edges = browser.ask("[...document.querySelectorAll('#nav a')].map((e) => e.getBoundingClientRect().right)")
    assert len(edges) == 6 and max(edges) <= 400
    browser.go("#rollout?colour=gradient")
    browser.wait("document.querySelector('.modes').scrollLeft > 0")
    right = browser.ask("document.querySelector('.modes [aria-pressed=true]').getBoundingClientRect().right")
    assert right <= 400


def test_the_figures_of_a_sample_are_one_line(browser: Browser, run: Path) -> None:
    browser.open(run / "report.html", "#rollout?rollout=3")
    lines = browser.ask(
        "[...document.querySelectorAll('.chips')].filter((e) => e.children.length === 4)"  # no second reward
        ".map((e) => new Set([...e.children].map((c) => c.offsetTop)).size)"
    )
    assert len(lines) > ROWS // 2 and set(lines) == {1}
    assert browser.ask("[...document.querySelectorAll('.sample .finish')].length") == ROWS


def test_rounding_is_drawn_level_and_other_curves_say_their_range(browser: Browser, tmp_path: Path) -> None:
    rows = [
        {"a": 2e-14 * (n % 2), "b": 1.5 + 1e-8 * n, "c": 3.0, "d": 1e-6 * n, "e": -0.25 + 0.5 * n} for n in range(4)
    ]
    (tmp_path / "metrics.jsonl").write_text(
        "\n".join(json.dumps({"step": step, **row}) for step, row in enumerate(rows))
    )
    write_report([tmp_path], tmp_path / "report.html")
    browser.open(tmp_path / "report.html", "#curves?find=")
    browser.ask("document.querySelectorAll('details').forEach((e) => { e.open = true; })")
    shown = browser.ask(
        "Object.fromEntries([...document.querySelectorAll('article.metric')].map((e) => "
        "[e.dataset.metric, e.querySelector('.range').textContent]))"
    )
    assert shown == {"a": "level", "b": "level", "c": "level", "d": "0 to 3.00e\u22126", "e": "\u22120.25 to 1.25"}


def test_files_beside_the_report_are_read_when_they_are_needed(browser: Browser, run: Path) -> None:
    write_report([run], run / "beside.html", embedded=0)
    browser.open(run / "beside.html")
    assert not [url for url in browser.requests if url.endswith(".js")]
    browser.go("#rollout?rollout=2")
    assert browser.ask("document.querySelectorAll('article.sample').length") == ROWS
    assert [Path(url).name for url in browser.requests if url.endswith(".js")] == ["2.js"]
    (run / "beside-rollouts" / "1.js").unlink()
    browser.go("#rollout?rollout=1")
    assert "expected beside-rollouts/1.js beside the report" in browser.ask(
        "document.getElementById('main').textContent"
    )
    browser.said.clear()  # the browser says that a file is missing


def test_whatever_a_run_has_written_stays_text(browser: Browser, run: Path, tmp_path: Path) -> None:
    report = tmp_path / "report"
    report.mkdir()
    for suffix in ("json", "safetensors"):
        (report / f"rollout-000001.{suffix}").write_bytes((run / "report" / f"rollout-000001.{suffix}").read_bytes())
    recording = Recording.load(report / "rollout-000001.json")
    header = copy.deepcopy(recording.header)
    header["tokens"] = {key: INJECTIONS[place % 20] for place, key in enumerate(header["tokens"])}
    for place, sample in enumerate(header["samples"]):
        sample["prompt"] = INJECTIONS[place % 20]
    renamed = {f"rollout/rewards_by_function/{text}": recording.rollout.rewards.clone() for text in INJECTIONS}
    turns = torch.where(recording.rollout.action_mask, 1, 0)
    half = torch.arange(recording.rollout.width) % 3 == 2  # what a tool says
    actions = recording.rollout.action_mask & ~half
    told = {"rollout/token_extras/turns": torch.where(half, 0, turns), "rollout/action_mask": actions}
    tensors = {**recording.tensors, **renamed, **told, "rollout/valid_tokens": recording.rollout.valid_tokens & actions}
    Recording(header=header, tensors=tensors).save(report)
    lines = [{"begin": 0}, {"step": 2, **dict.fromkeys(INJECTIONS, 1.0)}, {"step": 3, **dict.fromkeys(INJECTIONS, 2.0)}]
    findings = [
        dict.fromkeys(("check", "culprit", "expected", "observed", "cure", "severity"), text) for text in INJECTIONS
    ]
    ids = recording.rollout.sample_ids.tolist()
    end = {"end": 3, "error": INJECTIONS[0], "message": "\n".join(INJECTIONS)}
    (report / "metrics.jsonl").write_text("\n".join(map(json.dumps, [*lines, end])))
    text = "\n".join(json.dumps({"rollout": 1, "samples": ids[:2], **finding}) for finding in findings)
    (report / "findings.jsonl").write_text(text)
    (report / "run.json").write_text(json.dumps({"module": {text: list(INJECTIONS) for text in INJECTIONS}}))
    write_report([tmp_path], tmp_path / "evil.html", title=INJECTIONS[1])
    browser.open(tmp_path / "evil.html")
    scripts = browser.ask("document.querySelectorAll('script').length")
    said = browser.ask("document.getElementById('end').textContent")
    assert said.startswith(f"Ended by {INJECTIONS[0]} at step 3: {INJECTIONS[0]}\n") and "\u202e" not in said
    assert browser.ask("document.querySelectorAll('#end *').length") == 1
    elements = "['img', 'iframe', 'link', 'base', 'form', 'template', 'object', 'b', 'svg:not(.stream)']"
    for view in (
        "curves",
        f"metric?name={INJECTIONS[0]}",
        "flow",
        "findings",
        "rollout?sort=length",
        "rollout?colour=taken",
        "configuration",
    ):
        browser.go(f"#{view}" if "name=" not in view else "#metric?name=%3Cscript%3Ewindow.hit%3D1%3C%2Fscript%3E")
        page = "document.getElementById('main')"
        assert browser.ask(f"{page}.querySelectorAll({elements}.join(',')).length") == 0, view
        assert browser.ask("document.querySelectorAll('script').length") == scripts
        assert browser.ask("[...document.querySelectorAll('a')].every((e) => e.getAttribute('href').startsWith('#'))")
        assert browser.ask("window.hit === undefined")
    browser.go("#rollout")
    shown = browser.ask("[...document.querySelectorAll('.t, .prompt, dt')].map((e) => e.textContent).join('\\n')")
    for injection in INJECTIONS[:18]:
        assert injection in shown
    assert "\\u202e" in shown and "\u202e" not in shown and "\\u001b" in shown and "\\u2028" in shown
    assert browser.ask("document.title") == INJECTIONS[1]
    spoken = browser.ask("[...document.querySelectorAll('.span.environment .t')].map((e) => e.textContent)")
    texts = browser.ask("[...PAGES.values()][0].texts.map((t) => visible(t, true))")
    assert spoken and set(spoken) <= set(texts)


def test_a_script_that_is_not_the_packages_is_refused(browser: Browser, run: Path, tmp_path: Path) -> None:
    text = (run / "report.html").read_text()
    (tmp_path / "more.html").write_text(text.replace("</body>", "<script>window.hit = 1</script></body>"))
    browser.open(tmp_path / "more.html")
    assert browser.ask("window.hit === undefined")
    assert any("Content Security Policy" in said for said in browser.said)
    browser.said.clear()
    assert browser.ask("fetch('http://127.0.0.1:9/').then(() => 'sent', () => 'refused')") == "refused"
    assert all("Content Security Policy" in said for said in browser.said)
    browser.said.clear()
    browser.requests.clear()


def test_stale_weights_give_themselves_away(browser: Browser, tmp_path: Path) -> None:
    module = tiny_module(engine=StaleEngine(3), tokenizer=tiny_tokenizer(), optimizer=partial(AdamW, lr=0.01))
    fit(module, callbacks=[RunReport(1)], data=tiny_prompts(32, 4), default_root_dir=tmp_path)
    browser.open(tmp_path / "report" / "report.html")
    named = browser.ask("[...document.querySelectorAll('#main > div > .notice a')].map((e) => e.textContent)")
    assert named[0] == "kl/rollout" and "kl/old" not in named
    browser.click("#main .notice a")  # 1: the notice above the curves
    facts = browser.ask("document.querySelector('dl.facts').textContent")
    assert "5 of 8 points" in facts and "the engine did not sample from the policy that is trained" in facts
    browser.click("#moved-tokens a")  # 2: the token with the largest share
    facts = browser.ask(
        "Object.fromEntries([...document.querySelectorAll('.panel dd')].map((e) => [e.dataset.fact, e.textContent]))"
    )
    assert facts["drawn with version"].endswith(", that of this rollout") and facts["ratio"] == "1"
    gaps = browser.ask(
        "[...document.querySelectorAll('.panel dd')].filter((e) => /^trainer . engine$/.test(e.dataset.fact))"
        ".map((e) => Number(e.firstChild.dataset.value))"
    )
    assert len(gaps) == 1 and abs(gaps[0]) > 0.3
    browser.go("#rollout?rollout=2&colour=difference")  # 3: the rollout before the fault
    assert browser.ask("[...document.querySelectorAll('.t')].every((e) => !e.style.background)")


CURVES = {
    "kl/rollout": ([0.0, 0.4, 4.1, 0.3], 1),  # as much as the policy moved, but for the last
    "kl/old": ([0.0, 0.4, 4.1, 0.01], 2),
    "kl/ref": ([0.0, 0.6, 4.1, 1.0], 1),
    "optim/grad_norm": ([0.0] * 4, 4),
    "ledger/weight/used": ([0.0] * 4, 4),
    "advantage/std": ([0.0, 0.0, 0.0, 0.5], 0),
}


def test_what_is_beyond_normal_is_judged_with_what_it_stands_on(browser: Browser, tmp_path: Path) -> None:
    lines = [{"step": step, **{name: values[step] for name, (values, _) in CURVES.items()}} for step in range(4)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    write_report([tmp_path], tmp_path / "report.html")
    browser.open(tmp_path / "report.html")
    counts = browser.ask("Object.fromEntries(Object.keys(RUN.metrics).map((name) => [name, beyond(name).length]))")
    assert counts == {name: count for name, (_, count) in CURVES.items()}
    entries = {name: entry for name in CURVES if (entry := entry_of(name)) is not None}
    for name in ("kl/rollout", "kl/old", "kl/ref"):  # the rule of the terminal
        values, bases = CURVES[name][0], CURVES.get(entries[name].baseline, ([0.0] * 4, 0))[0]
        assert sum(map(entries[name].is_beyond, values, bases)) == counts[name]


@pytest.mark.nightly
def test_a_thousand_long_samples_open_quickly(browser: Browser, run: Path, tmp_path: Path) -> None:
    recording, number, width = Recording.load(run / "report" / "rollout-000001.json"), 1000, 512
    draw = torch.Generator().manual_seed(0)
    noise = partial(torch.randn, number, width, generator=draw)
    old, ids = -noise().abs(), torch.randint(0, 30_000, (number, width), generator=draw)
    rollout = Rollout.of_samples(
        [[1, 2, 3]] * number, ids.tolist(), groups=[row // 8 for row in range(number)], sample_ids=range(number)
    )
    scores = torch.randint(0, 2, (number,), generator=draw).float()
    rollout = rollout.replace(
        rewards=scores, rewards_by_function={"right": scores}, advantages=(scores - 0.5)[:, None].expand_as(old),
        rollout_logprobs=old + 0.01 * noise(), old_logprobs=old, ref_logprobs=old + 0.1 * noise(),
    )  # fmt: skip
    passes = {"logprobs": old + 0.01 * noise(), "entropy": noise().abs(), "gradient": 1e-6 * noise()}
    tensors = {f"rollout/{name}": tensor for name, tensor in rollout.tensors()}
    tensors |= {f"pass/0/{name}": tensor for name, tensor in passes.items()}
    samples = [{"sample": row, "prompt": "what is 1 + 1?"} for row in range(number)]
    header = {
        **recording.header, "samples": samples, "steps": recording.header["steps"][:1],
        "plan": [[list(range(number))]], "tokens": {str(token): f" word{token}" for token in range(30_000)},
    }  # fmt: skip
    tensors = {name: tensor.clone() for name, tensor in {**tensors, "sampled/scored": rollout.trained}.items()}
    Recording(header=header, tensors=tensors).save(tmp_path)
    write_report([tmp_path], tmp_path / "large.html")
    assert (tmp_path / "large.html").stat().st_size < 30e6
    assert not (tmp_path / "large-rollouts").exists()
    browser.call("Performance.enable", timeDomain="threadTicks")  # of the processor: a machine may be busy
    before = browser.processor_seconds()
    browser.open(tmp_path / "large.html", "#rollout?colour=difference")
    assert browser.processor_seconds() - before < 3
    assert browser.ask("document.querySelectorAll('.t').length") == 24 * width


def test_a_rollout_shows_the_pictures_of_its_prompts(browser: Browser, tmp_path: Path) -> None:
    module = tiny_module(
        policy=lambda: vision_model("qwen2_5_vl"), tokenizer=PROCESSORS["qwen2_5_vl"](), eos_token_ids=[1]
    )
    data = PromptDataModule(picture_rows(3), 3)
    fit(module, callbacks=[RunReport()], data=data, max_steps=1, default_root_dir=str(tmp_path))
    browser.open(tmp_path / "report" / "report.html", "#rollout?rollout=0")
    sizes = "[...section.querySelectorAll('.pictures img')].map((i) => [i.naturalWidth, i.naturalHeight])"
    groups = f"[...document.querySelectorAll('section.group')].map((section) => {sizes})"
    shown = browser.wait(f"{groups}.flat().length === 3 && {groups}.flat().every((size) => size[0]) && {groups}")
    prompts = [prompt.media for prompt in data.at(range(3))]
    assert shown == [[] if each is None else [[p.shape[1], p.shape[0]] for p in each.pictures] for each in prompts]
