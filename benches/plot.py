"""Tables for benches/README.md and plots for benches/plots, from the results of `scripts/bench run`.

Arguments: the file of results, and the folder of the benches. Tables go between the markers `<!-- NAME -->` and
`<!-- end of NAME -->`. A table or plot whose results are missing stays as it is.
"""

import io
import json
import pathlib
import re
import sys

import matplotlib

matplotlib.use("Agg")
from matplotlib import patches, pyplot, ticker
from PIL import Image

STORES = ["Memory", "SQLite", "Redis", "Redis Cluster", "PostgreSQL", "MariaDB", "NATS", "DynamoDB (emulator)"]
COLOURS = dict(zip(STORES, [
    "#4c72b0", "#55a868", "#c44e52", "#dd8452", "#8172b3", "#64b5cd", "#ccb974", "#937860",
]))
GREY = "#b0b0b0"
TASKS = [1, 64, 1024]


def read(path):
    """The last result of each line, without those of quick runs."""
    results = {}
    for line in pathlib.Path(path).read_text(encoding="utf-8").splitlines():
        result = json.loads(line)
        if not result.get("quick"):
            # The name of a line of `peers` contains its concurrency in brackets, which may differ from run to run.
            work = re.sub(r" \(.*", "", result["work"]) if result["bench"] == "peers" else result["work"]
            results[result["bench"], result["table"], work] = result
    return results


def figure(value):
    """A number with three digits."""
    if value is None:
        return ""
    if abs(value) >= 100:
        return f"{value:,.0f}".replace(",", " ")
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def both(result):
    """Bars of the library's throughput beside those of the code by hand."""
    if result is None:
        return ""
    raw = result.get("raw")
    return figure(result["idem"]["value"]) + (f" ({figure(raw['value'])})" if raw else "")


def calls(results):
    rows = []
    for work in ["first run", "replay", "in progress"]:
        for tasks in TASKS:
            name = f"{work}, {tasks} {'task' if tasks == 1 else 'tasks'}"
            found = [results.get(("matrix", f"{store}: calls", name)) for store in STORES]
            rows.append([name, *map(both, found)])
    for tasks in TASKS:
        name = f"wait, {tasks} {'task' if tasks == 1 else 'tasks'}"
        found = [results.get(("matrix", f"{store}: wait", name)) for store in STORES]
        rows.append([name + ", ms", *map(both, found)])
    for size in ["1 KB", "64 KB", "1 MB"]:
        for work in ["first run", "replay"]:
            name = f"{work} of {size}, 16 tasks"
            found = [results.get(("matrix", f"{store}: results", name)) for store in STORES]
            rows.append([name, *map(both, found)])
    return table(["thousand a second", *STORES], rows)


def per_store(results, section, unit):
    """All lines of a section: the number of tasks or duplicates differs between stores."""
    names = dict.fromkeys(key[2] for key in results if key[0] == "matrix" and key[1].endswith(f": {section}"))
    rows = []
    for name in names:
        found = [results.get(("matrix", f"{store}: {section}", name)) for store in STORES]
        rows.append([name, *map(both, found)])
    return table([unit, *STORES], rows)


def ratios(results, section, unit):
    """One figure for each store and line, with the middle half of the rounds."""
    names = dict.fromkeys(key[2] for key in results if key[0] == "matrix" and key[1].endswith(f": {section}"))
    rows = []
    for name in names:
        found = [results.get(("matrix", f"{store}: {section}", name)) for store in STORES]
        lines = [it and it["result"] for it in found]
        rows.append([name, *(
            f"**{figure(it['value'])}** ({figure(it['low'])} to {figure(it['high'])})" if it else "" for it in lines
        )])
    return table([unit, *STORES], rows)


def peers(results):
    rows = []
    for (bench, where, _), result in results.items():
        if bench == "peers":
            peer, ours = re.match(r"(.*?)(?:, idem \((.*)\))$", result["work"]).groups()
            low, high = result["result"]["low"], result["result"]["high"]
            met = {True: "met", False: "**missed**", None: ""}[result["met"]]
            rows.append([
                where.removeprefix("Peers on "), peer, figure(result["raw"]["value"]),
                f"{figure(result['idem']['value'])} ({ours})", f"**{figure(result['result']['value'])}**",
                f"{figure(low)} to {figure(high)}", result["goal"] or "", met,
            ])
    return table(["server", "peer, at its best", "peer", "idem, at its best", "ratio", "middle half", "goal", ""], rows)


def share(results):
    found = [result for (bench, _, _), result in results.items() if bench == "share"]
    columns = list(found[0]["share"])
    rows = [[it["work"], *(f"{it['share'][column]:.0%}" for column in columns), f"{it['idem_ns']:.0f}"] for it in found]
    return table(["work", *columns, "ns of `idem` a call"], rows)


def lines(results, bench):
    """The table of a bench as the bench prints it; with a column for the limit if a line has a limit."""
    found = [it for (its_bench, _, _), it in results.items() if its_bench == bench]
    has_limit = any(it.get("limit") for it in found)
    rows = []
    for it in found:
        raw, limit, result = it["raw"], it.get("limit"), it["result"]
        met = {True: "met", False: "**missed**", None: ""}[it["met"]]
        rows.append([
            it["work"], figure(raw["value"]) if raw else "",
            *([figure(limit["value"]) if limit else ""] if has_limit else []),
            figure(it["idem"]["value"]), f"**{figure(result['value'])}**" if raw else "",
            f"{figure(result['low'])} to {figure(result['high'])}", it["goal"] or "", met,
        ])
    head = [f"line, {found[0]['unit']}", "by hand", *(["limit"] if has_limit else []), "idem", "ratio", "middle half", "goal", ""]
    return table(head, rows)


def finish(axes, title, unit):
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_ylabel(unit, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(axis="y", which="major", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ["top", "right"]:
        axes.spines[side].set_visible(False)


def log_scale(axis):
    """Plain numbers on the axis, at every power of ten."""
    axis.set_major_locator(ticker.LogLocator(numticks=12))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,g}".replace(",", " ")))
    axis.set_minor_formatter(ticker.NullFormatter())


def save(chart, path):
    picture = io.BytesIO()
    chart.savefig(picture, dpi=100, bbox_inches="tight")
    pyplot.close(chart)
    # A palette reduces the picture to a third of its size.
    Image.open(picture).convert("RGB").quantize(64, dither=Image.Dither.NONE).save(path, optimize=True)
    print(path)


def plot_calls(results, path):
    works = [("first run", "calls"), ("replay", "calls"), ("in progress", "calls"), ("wait", "wait")]
    chart, grid = pyplot.subplots(2, 2, figsize=(11, 7.5), layout="constrained")
    for axes, (work, section) in zip(grid.flat, works):
        for store in STORES:
            found = [
                results.get(("matrix", f"{store}: {section}", f"{work}, {tasks} {'task' if tasks == 1 else 'tasks'}"))
                for tasks in TASKS
            ]
            at = [tasks for tasks, it in zip(TASKS, found) if it]
            axes.plot(at, [it["idem"]["value"] for it in found if it], marker="o", label=store, color=COLOURS[store])
            raw = [(tasks, it["raw"]["value"]) for tasks, it in zip(TASKS, found) if it and it["raw"]]
            if raw:
                axes.plot(*zip(*raw), marker="x", linestyle=":", color=COLOURS[store])
        axes.set_xscale("log")
        axes.set_yscale("log")
        log_scale(axes.yaxis)
        axes.set_xticks(TASKS, [str(tasks) for tasks in TASKS])
        axes.xaxis.set_minor_locator(ticker.NullLocator())
        axes.set_xlabel("tasks" if work != "wait" else "waiting duplicates", fontsize=9)
        unit = "thousand calls a second" if work != "wait" else "ms until the last has its result"
        finish(axes, work + ("" if work == "wait" else " (dotted: by hand)"), unit)
    names = grid[0][0].get_legend_handles_labels()
    chart.legend(*names, fontsize=9, frameon=False, ncol=len(STORES), loc="outside upper center")
    save(chart, path)


def plot_peers(results, path):
    chart, grid = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained", width_ratios=[5, 3])
    for axes, server in zip(grid, ["Redis", "PostgreSQL"]):
        found = {key[2]: it for key, it in results.items() if key[:2] == ("peers", f"Peers on {server}")}
        names = list(dict.fromkeys(name.split(": ", 1)[1] for name in found))
        for n, name in enumerate(names):
            for at, work in [(-0.21, "first run"), (0.21, "replay")]:
                it = found.get(f"{work}: {name}")
                if not it:
                    continue
                for side, shift, colour in [("raw", -0.1, GREY), ("idem", 0.1, "#4c72b0" if at < 0 else "#c44e52")]:
                    axes.bar(n + at + shift, it[side]["value"], width=0.19, color=colour)
                top = max(it["raw"]["value"], it["idem"]["value"])
                axes.annotate(f"{figure(it['result']['value'])}×", (n + at, top), ha="center", va="bottom", fontsize=8)
        axes.set_yscale("log")
        log_scale(axes.yaxis)
        axes.set_ylim(bottom=0.1)
        short = [re.sub(r"(,| (?=with)|crate) ?", lambda it: it[1].rstrip() + "\n", name) for name in names]
        axes.set_xticks(range(len(names)), short)
        finish(axes, f"on {server}", "thousand calls a second")
    colours = [("peer", GREY), ("idem, first run", "#4c72b0"), ("idem, replay", "#c44e52")]
    marks = [patches.Patch(color=colour, label=label) for label, colour in colours]
    chart.legend(handles=marks, fontsize=9, frameon=False, ncol=3, loc="outside upper center")
    save(chart, path)


def plot_results(results, path):
    chart, grid = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    sizes = ["1 KB", "64 KB", "1 MB"]
    for axes, work in zip(grid, ["first run", "replay"]):
        for store in STORES:
            found = [results.get(("matrix", f"{store}: results", f"{work} of {size}, 16 tasks")) for size in sizes]
            at = [n for n, it in enumerate(found) if it]
            axes.plot(at, [it["idem"]["value"] for it in found if it], marker="o", label=store, color=COLOURS[store])
            raw = [(n, it["raw"]["value"]) for n, it in enumerate(found) if it and it["raw"]]
            if raw:
                axes.plot(*zip(*raw), marker="x", linestyle=":", color=COLOURS[store])
        axes.set_yscale("log")
        log_scale(axes.yaxis)
        axes.set_xticks(range(len(sizes)), sizes)
        axes.set_xlabel("result", fontsize=9)
        finish(axes, f"{work}, 16 tasks (dotted: by hand)", "thousand calls a second")
    names = grid[0].get_legend_handles_labels()
    chart.legend(*names, fontsize=9, frameon=False, ncol=len(STORES), loc="outside upper center")
    save(chart, path)


def plot_share(results, path):
    found = [result for (bench, _, _), result in results.items() if bench == "share"][::-1]
    columns = list(found[0]["share"])
    colours = ["#c44e52", "#dd8452", "#ccb974", "#55a868", "#64b5cd", "#a1c9f4", "#8172b3", "#937860", GREY]
    chart, axes = pyplot.subplots(figsize=(10, 4), layout="constrained")
    left = [0.0] * len(found)
    for column, colour in zip(columns, colours):
        widths = [100 * it["share"][column] for it in found]
        axes.barh([it["work"] for it in found], widths, left=left, label=column, color=colour)
        left = [a + b for a, b in zip(left, widths)]
    axes.set_xlabel("% of the client's processor time", fontsize=9)
    axes.set_xlim(0, 100)
    axes.legend(fontsize=8, frameon=False, ncol=len(columns), loc="lower center", bbox_to_anchor=(0.45, 1))
    axes.tick_params(labelsize=8)
    save(chart, path)


def main():
    results, folder = read(sys.argv[1]), pathlib.Path(sys.argv[2])
    plots = folder / "plots"
    plots.mkdir(exist_ok=True)
    benches, tables = {key[0] for key in results}, {}
    sections = {key[1].split(": ")[1] for key in results if key[0] == "matrix"}
    if {"calls", "wait", "results"} & sections:
        tables["matrix: calls"] = calls(results)
        plot_calls(results, plots / "calls.png")
        plot_results(results, plots / "results.png")
    if "hot key" in sections:
        tables["matrix: hot key"] = per_store(results, "hot key", "line")
    if "steps" in sections:
        tables["matrix: steps"] = ratios(results, "steps", "halves of a first run")
    if "takeovers" in sections:
        tables["matrix: takeovers"] = ratios(results, "takeovers", "times an attempt without a journal")
    if "leases" in sections:
        tables["matrix: leases"] = per_store(results, "leases", "ms")
    if "peers" in benches:
        tables["peers"] = peers(results)
        plot_peers(results, plots / "peers.png")
    if "share" in benches:
        tables["share"] = share(results)
        plot_share(results, plots / "share.png")
    page = folder / "README.md"
    text = page.read_text(encoding="utf-8")
    # Every other bench is shown in the table that it prints.
    for bench in benches:
        if f"<!-- {bench} -->" in text and bench not in tables:
            tables[bench] = lines(results, bench)
    for name, rows in tables.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        if begin not in text:
            print(f"{page} has no place for `{name}`", file=sys.stderr)
            continue
        before, rest = text.split(begin, 1)
        text = before + begin + "\n" + rows + "\n\n" + end + rest.split(end, 1)[1]
    page.write_text(text, encoding="utf-8")


main()
