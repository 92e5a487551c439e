"""The report on runs: tables beside the paper's, the page, and folders in any state."""

import html.parser
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from innerloop.errors import InnerLoopError
from innerloop.experiments.report import figures, paper
from innerloop.experiments.report.command import main, report
from innerloop.experiments.report.runs import read_runs
from innerloop.experiments.report.tables import appendix, average, table_1

CONFIG = {
    "dataset": "omniglot",
    "way": 5,
    "shot": 1,
    "model": "vgg",
    "inner_optim": "sgd",
    "seed": 0,
    "iterations": 300,
}
RATES = [[0.1, 0.2, 0.3], [0.1, 0.0, -0.1]]  # [steps, groups]


def records(count=3, **learned):
    return [
        {
            "epoch": k + 1,
            "iteration": 100 * (k + 1),
            "train_loss": 1.0 / (k + 1),
            "val_accuracy": 0.5 + k / 10,
            "learned": {"lr": RATES, **learned},
        }
        for k in range(count)
    ]


def make(folder, accuracy=0.99, metrics=None, **config):
    """An invented run; without an accuracy it is not finished."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    lines = [json.dumps(record) for record in (records() if metrics is None else metrics)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    if accuracy is not None:
        result = {"accuracy": accuracy, "interval": 0.002, "epoch": 3, "seconds": 90.0}
        (folder / "result.json").write_text(json.dumps(result))
    return folder


def means(*folders):
    runs, remarks = read_runs(folders)
    return average(runs, remarks), remarks


def words(line):
    return [word.strip() for word in re.split("[│┃]", line)[1:-1]]


# The paper's numbers. -----------------------------------------------------------------------------


def test_table_1_of_the_paper_agrees_with_its_appendix():
    for cell in paper.CELLS:
        assert paper.APPENDIX[paper.Setup(*cell, "vgg", "sgd")] == paper.BASE[cell]
        assert paper.APPENDIX[paper.Setup(*cell, *paper.BEST_SETUP[cell])] == paper.BEST[cell]
        fitting = [r.mean for s, r in paper.APPENDIX.items() if s.cell == cell]
        assert max(fitting) == paper.BEST[cell].mean


def test_the_appendix_has_the_papers_38_rows():
    assert len(paper.APPENDIX) == 38
    assert {setup.cell for setup in paper.APPENDIX} == set(paper.CELLS)


# Means and tables. --------------------------------------------------------------------------------


def test_mean_and_spread_over_seeds(tmp_path):
    for seed, accuracy in enumerate((0.98, 0.99, 1.0)):
        make(tmp_path / str(seed), accuracy, seed=seed)
    found, remarks = means(tmp_path)
    (mean,) = found.values()
    assert (mean.mean, mean.std, mean.seeds) == (pytest.approx(99), pytest.approx(1), 3)
    assert not remarks


def test_ours_beside_theirs_in_table_1(tmp_path):
    make(tmp_path / "base", 0.99)
    make(tmp_path / "best", 0.995, model="resnet-8", inner_optim="adam")
    rows = {row[0]: row[1] for row in table_1(means(tmp_path)[0]).rows if row[0].strip()}
    assert rows["MAML++ (Antoniou et al.)"] == "99.53 ± 0.26"
    assert rows["innerloop (base)"] == "99.00"
    assert rows["innerloop (best)"] == "99.50"
    table = table_1(means(tmp_path)[0])
    differences = [row[1] for row in table.rows if row[0] == "  difference"]
    assert differences == ["-0.62", "-0.41"]
    assert [row[1:3] for row in table.rows if row[0] == "  seeds"] == [["1", "-"]] * 2
    assert table.rows[-1] == ["", "resnet-8+Adam", *["-"] * 5]


def test_the_appendix_in_the_papers_form(tmp_path):
    make(tmp_path / "0", 0.97, way=20, seed=0)
    make(tmp_path / "1", 0.98, way=20, seed=1)
    make(tmp_path / "2", 0.60, dataset="glyphs", model="mlp")
    table = appendix(means(tmp_path)[0])
    assert len(table.rows) == 39
    assert table.rows[0][:7] == ["mini-imagenet", "5", "1", "densenet-8", "SGD", "46.08", "1.40"]
    assert table.rows[3][:6] == ["", "", "", "", "SGD", "54.36"]
    ours = [row for row in table.rows if row[9] == "2"]
    assert ours == [["", "", "", "", "SGD", "97.21", "0.11", "97.50", "0.71", "2", "+0.29"]]
    assert table.rows[-1][:7] == ["glyphs", "5", "1", "mlp", "SGD", "-", "-"]
    assert table.rows[-1][7:] == ["60.00", "-", "1", "-"]


# Settings of each run beside its seed, and those that are not averaged with the first.
AVERAGED = {
    "other settings": ([{}, {}, {"iterations": 9}], [2]),
    "places": (
        [
            {"out": "a", "device": "cpu", "data": "x", "keep": 2},
            {"out": "b", "device": "cuda", "data": None, "keep": 5},
        ],
        [],
    ),
    "newer settings": ([{}, {"size": None, "clip": None}, {"clip": 10.0}], [2]),
}


@pytest.mark.parametrize("name", AVERAGED)
def test_runs_with_other_settings_are_not_averaged(name, tmp_path):
    each, others = AVERAGED[name]
    for seed, config in enumerate(each):
        make(tmp_path / str(seed), 0.9 + seed / 100, seed=seed, **config)
    found, remarks = means(tmp_path)
    (mean,) = found.values()
    assert mean.seeds == 2 and mean.mean == pytest.approx(90.5)
    assert [int(r.folder.name) for r in remarks] == others
    assert all("other settings" in r.text for r in remarks)


def test_each_of_the_betas_has_an_axis_of_its_own(tmp_path):
    betas = [[[b, 0.99 + b / 100] for b in (0.9, c, 0.92)] for c in (0.90, 0.91)]
    metrics = [records(2, betas=one)[k] for k, one in enumerate(betas)]
    (run,) = read_runs([make(tmp_path / "a", metrics=metrics, inner_optim="adam")])[0]
    shown = figures.learned_figures(run, "a")["betas"]
    assert re.search(r">0\.999\d+<", shown) and re.search(r">0\.91\d*<", shown)


def test_runs_on_a_part_of_the_data_are_told_apart(tmp_path):
    whole = {"train": 38_400, "val": 9_600, "test": 12_000}
    part = {name: count // 6 for name, count in whole.items()}
    for k, pictures in enumerate((whole, whole, part)):
        make(tmp_path / str(k), 0.5 + k / 10, seed=k, dataset="mini-imagenet")
        path = tmp_path / str(k) / "result.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"pictures": pictures}))
    found, remarks = means(tmp_path)
    (mean,) = found.values()
    assert mean.seeds == 2 and mean.mean == pytest.approx(55)
    told = " ".join(remark.text for remark in remarks)
    assert "10000 of the 60000 images" in told and "other settings" in told


@pytest.mark.parametrize("dataset", ["folder", "cifar-fs"])
def test_pictures_of_ones_own_from_two_folders_are_two_datasets(dataset, tmp_path):
    long = "pictures/" * 12
    for k, data in enumerate((f"/{long}one", f"/{long}one", f"/{long}two", None)):
        make(tmp_path / str(k), 0.5 + k / 10, seed=k, dataset=dataset, data=data)
    found, remarks = means(tmp_path)
    names = [f"{dataset} /{long}one", f"{dataset} /{long}two", f"{dataset} INNERLOOP_DATA"]
    assert [setup.dataset for setup in found] == names and not remarks
    assert [mean.mean for mean in found.values()] == pytest.approx([55, 70, 80])
    lines = report([tmp_path], tmp_path / "page.html").splitlines()
    printed = "".join(words(line)[0] for line in lines if line.startswith("│"))
    assert f"/{long}one" in printed and f"/{long}two" in printed  # not cut
    for name in names:
        assert f"<td>{name}</td>" in (tmp_path / "page.html").read_text()


def test_the_same_seed_twice_counts_once(tmp_path):
    make(tmp_path / "a", 0.9)
    make(tmp_path / "b", 0.8)
    found, remarks = means(tmp_path)
    assert next(iter(found.values())).mean == pytest.approx(90)
    assert "same settings and seed" in remarks[0].text


def test_a_run_named_twice_is_read_once(tmp_path):
    folder = make(tmp_path / "a")
    runs, remarks = read_runs([tmp_path, folder, tmp_path / "." / "a"])
    assert len(runs) == 1 and not remarks


def test_unfinished_runs_are_listed_but_do_not_count(tmp_path):
    make(tmp_path / "a", accuracy=None)
    found, remarks = means(tmp_path)
    assert not found and not remarks
    out = tmp_path / "page.html"
    assert "1 run, 0 finished" in report([tmp_path], out)
    assert "not finished; validation accuracy 70.00 % after epoch 3" in out.read_text()


def test_the_printed_tables(tmp_path):
    make(tmp_path / "a", 0.9901)
    lines = report([tmp_path], None).splitlines()
    assert any(words(line)[:2] == ["innerloop (base)", "99.01"] for line in lines)
    assert any(
        words(line)[4:] == ["SGD", "99.62", "0.08", "99.01", "-", "1", "-0.61"] for line in lines
    )
    assert "1 run, 1 finished." in lines


# The command. -------------------------------------------------------------------------------------


def test_the_command_prints_and_writes(tmp_path, capsys):
    make(tmp_path / "runs" / "a")
    out = tmp_path / "deep" / "page.html"
    assert main([str(tmp_path / "runs"), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "Table 1" in said and str(out) in said
    assert out.read_text().startswith("<!DOCTYPE html>")


def test_the_command_without_any_run(tmp_path, capsys):
    assert main([str(tmp_path), "--out", str(tmp_path / "page.html")]) == 1
    assert "holds no run" in capsys.readouterr().out


def test_a_page_that_cannot_be_written(tmp_path, capsys):
    folder = make(tmp_path / "a")
    with pytest.raises(InnerLoopError, match="--out"):
        report([folder], tmp_path)
    assert main([str(folder), "--out", str(folder / "config.json" / "x")]) == 2
    assert "cannot be written" in capsys.readouterr().err


# Folders in any state. ----------------------------------------------------------------------------


def change(folder, **values):
    """Other values in the result of a run."""
    path = folder / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_updates_left_out_and_guesses_stand_beside_the_number(tmp_path):
    change(make(tmp_path / "a", 0.5), skipped=6, diverged=1)
    change(make(tmp_path / "b", 0.75, way=20), skipped=0, diverged=0)
    change(make(tmp_path / "c", 0.25, model="resnet-4"), skipped=1)
    text = report([tmp_path], tmp_path / "page.html")
    flaws = "left out 6 updates and guessed 1 times at a test task, where adaptation diverged"
    assert f"Remark: {tmp_path / 'a'} {flaws}" in text
    assert f"Remark: {tmp_path / 'c'} left out 1 update" in text
    assert f"Remark: {tmp_path / 'b'}" not in text
    page = (tmp_path / "page.html").read_text()
    for shown in (text, page):
        assert shown.count("50.00*") == 3  # base and best of table 1, and the appendix
        assert shown.count("25.00*") == 1 and "75.00*" not in shown and "A star" in shown
    assert f"it {flaws}</summary>" in page


UNREADABLE = {
    "settings cut off": ("config.json", '{"dataset": "omni', "JSONDecodeError"),
    "settings a list": ("config.json", "[1]", "TypeError"),
    "settings of another command": ("config.json", '{"steps": 3}', "KeyError('dataset')"),
    "result cut off": ("result.json", '{"accuracy": 0.', "JSONDecodeError"),
    "result without accuracy": ("result.json", "{}", "KeyError('accuracy')"),
    "result without a number": ("result.json", '{"accuracy": null}', "TypeError"),
    "metrics cut off": ("metrics.jsonl", '{"epoch": 2, "val', "JSONDecodeError"),
    "metrics of another command": ("metrics.jsonl", '{"loss": 2}', "KeyError('val_accuracy')"),
}


@pytest.mark.parametrize("damage", UNREADABLE)
def test_a_run_that_cannot_be_read_is_left_out_with_a_remark(damage, tmp_path):
    make(tmp_path / "runs" / "good", 0.9, seed=1)
    bad = make(tmp_path / "runs" / "bad", 0.9)
    name, content, why = UNREADABLE[damage]
    (bad / name).write_text(content)
    out = tmp_path / "page.html"
    text = report([tmp_path / "runs"], out)
    assert "90.00" in text and "1 run, 1 finished." in text
    remarks = re.findall(r"<p><strong>(.*?)</strong> (.*?)</p>", out.read_text())
    assert [Path(folder).name for folder, _ in remarks] == ["bad"]
    assert why in html.unescape(remarks[0][1])
    assert len(re.findall("^Remark: .*bad is left out", text, re.M)) == 1


def test_a_run_without_a_finished_epoch(tmp_path):
    (make(tmp_path / "a", accuracy=None) / "metrics.jsonl").unlink()
    out = tmp_path / "page.html"
    assert "Remark" not in report([tmp_path], out)
    assert "not finished" in out.read_text() and "No run has records to draw" in out.read_text()


HARMLESS = {
    "learned a number": {"lr": 0.1},
    "learned with gaps": {"lr": [0.1, None, 0.3]},
    "learned betas of two": {"betas": [0.9, 0.99]},
    "learned betas by group": {"betas": [[0.9, 0.99]] * 5},
    "learned betas by coefficient": {"betas": [[0.9] * 5, [0.99] * 5]},
    "learned enormous": {"lr": [1e300, 0.1]},
    "learned much": {"lr": [[0.1] * 299] * 5},
    "learned many steps": {"lr": [[0.1] * 4] * 40},
    "nothing learned": {},
}


@pytest.mark.parametrize("name", HARMLESS)
def test_learned_settings_of_every_shape_are_drawn(name, tmp_path):
    lines = [record | {"learned": HARMLESS[name]} for record in records()]
    folder = make(tmp_path / "a", metrics=lines)
    out = tmp_path / "page.html"
    assert "Remark" not in report([folder], out)
    assert out.read_text().count("<svg") == 1 + len(HARMLESS[name])


def test_folders_that_are_no_runs(tmp_path):
    make(tmp_path / "runs" / "a")
    (tmp_path / "runs" / "loop").symlink_to(tmp_path)
    (tmp_path / "none").mkdir()
    lines = report([tmp_path / name for name in ("runs", "none", "missing")], None).splitlines()
    assert [line for line in lines if line.startswith("Remark")] == [
        f"Remark: {tmp_path}/none holds no run: there is no config.json in it or below it",
        f"Remark: {tmp_path}/missing does not exist",
    ]


# The page. ----------------------------------------------------------------------------------------


class Page(html.parser.HTMLParser):
    """Collects tags, ids and addresses."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.ids, self.addresses, self.handlers = [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href", "xlink:href", "action", "data"):
                self.addresses.append(value)
            if name.startswith("on"):
                self.handlers.append(name)


EVIL = '<script>alert(1)</script><img src=x onerror="alert(2)">'


def hostile(tmp_path):
    names = {"model": EVIL, "dataset": f'"><{EVIL}', "inner_optim": "[bold]$\\frac{$&amp;--><"}
    lines = records(**{EVIL: [0.1], "$x": [0.2]})
    return make(tmp_path / "runs" / "<b>run'\"&", metrics=lines, **names, **{EVIL: EVIL})


def test_names_are_escaped_everywhere(tmp_path):
    hostile(tmp_path)
    make(tmp_path / "runs" / "<i>broken", **{"way": EVIL})
    out = tmp_path / "page.html"
    text = report([tmp_path / "runs"], out)
    content = out.read_text(encoding="utf-8")
    page = Page(content)
    assert not {"script", "img", "b", "i", "iframe", "object"} & set(page.tags)
    assert not page.handlers
    assert "&lt;script&gt;alert(1)" in content
    assert "[bold]" in text  # not taken for a style


def test_the_page_needs_nothing_else(tmp_path):
    for seed in range(2):
        make(tmp_path / str(seed), seed=seed)
        make(tmp_path / f"twenty {seed}", seed=seed, way=20, model="resnet-4")
    out = tmp_path / "page.html"
    report([tmp_path], out)
    content = out.read_text()
    page = Page(content)
    assert page.tags.count("svg") == 2 + 4
    assert all(a.startswith(("#", "data:,")) for a in page.addresses)
    assert "@import" not in content and "default-src 'none'" in content
    assert all(target.startswith("#") for target in re.findall(r"url\((.*?)\)", content))
    assert len(page.ids) == len(set(page.ids))
    used = {a[1:] for a in page.addresses if a.startswith("#")}
    assert used | set(re.findall(r"url\(#(.*?)\)", content)) <= set(page.ids)


def test_same_runs_same_page(tmp_path):
    make(tmp_path / "runs" / "a")
    pages = [tmp_path / "one.html", tmp_path / "two.html"]
    for page in pages:
        report([tmp_path / "runs"], page)
    assert pages[0].read_bytes() == pages[1].read_bytes()


def test_every_setting_of_a_run_is_on_the_page(tmp_path):
    make(tmp_path / "a", unusual_setting=[1, "two"])
    out = tmp_path / "page.html"
    report([tmp_path], out)
    assert "unusual_setting" in out.read_text() and "[1, &#34;two&#34;]" in out.read_text()


@pytest.mark.parametrize(
    ("epochs", "said"),
    [
        ([2, 1], "mean prediction of epochs 2, 1; 1.5 minutes"),
        ([2], "from epoch 2; 1.5 minutes"),
        (None, "from epoch 3; 1.5 minutes"),  # of an older version
    ],
)
def test_whose_prediction_it_is(epochs, said, tmp_path):
    change(make(tmp_path / "a"), epochs=epochs)
    out = tmp_path / "page.html"
    report([tmp_path], out)
    assert said in out.read_text()


def test_the_legend_hides_no_curve(tmp_path):
    for model in ("vgg", "resnet-4", "resnet-8"):
        make(tmp_path / model, model=model)
    svg = figures.curves(read_runs([tmp_path])[0], "x")
    frame = re.search(r'id="x-patch_2">\s*<path d="M (\S+) \S+ \s*L (\S+)', svg)
    legend = svg[svg.index("x-legend_1") :]
    texts = re.findall(r'<text [^>]* x="(\S+)"', legend)
    assert len(texts) == 4  # and chance
    assert min(map(float, texts)) > max(map(float, frame.groups()))


def browser():
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return next((path for path in map(shutil.which, names) if path), None)


@pytest.mark.skipif(browser() is None, reason="there is no Chromium or Chrome to open the page in")
def test_a_browser_opens_the_page_without_errors(tmp_path):
    hostile(tmp_path)
    make(tmp_path / "runs" / "a")
    out = tmp_path / "page.html"
    report([tmp_path / "runs"], out)
    command = [browser(), "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += ["--enable-logging=stderr", "--log-level=0", f"--user-data-dir={tmp_path / 'user'}"]
    done = subprocess.run([*command, out.as_uri()], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    page = Page(done.stdout)
    assert page.tags.count("table") >= 3 and page.tags.count("svg") >= 2
    assert not {"script", "img"} & set(page.tags)
