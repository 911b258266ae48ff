"""`vkit bench`: put a load on an engine in this process or on a server, and report; or compare two reports.

Only options, refusals and output are here; measuring is `vkit.benchmark`.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from vkit.commands import _options, _render
from vkit.errors import ExitStatus, UsageError, VkitError
from vkit.starting import starting

if TYPE_CHECKING:
    from rich.table import Table

    from vkit.benchmark.arrivals import Arrivals
    from vkit.benchmark.plots import Panel
    from vkit.benchmark.report import Setting
    from vkit.benchmark.session import MeasuredRun, Sweep, Workload
    from vkit.benchmark.statistics import Slo
    from vkit.benchmark.targets import Request, Target

STDOUT = "-"
MAX_ERRORS_SHOWN = 3
MAX_TEMPERATURE = 2.0
LEN_TOLERANCE = 0.1
MIN_NUM_SEQS = 8
OPEN_LOOP_NUM_SEQS = 128
PIPE_WIDTH = 4000

PROMPT_PANEL = "Prompts"
LOAD_PANEL = "Load"
SERVER_PANEL = "Server"
OUTPUT_PANEL = "Results"


def _option(panel: str, *flags: str, help: str, **settings: Any) -> Any:
    return typer.Option(*flags, help=help, rich_help_panel=panel, **settings)


@dataclass(frozen=True)
class PromptFlags:
    """What is asked."""

    dataset: Annotated[
        Literal["random", "sharegpt", "jsonl", "shared-prefix"] | None,
        _option(PROMPT_PANEL, "--dataset", help="Where prompts come from.", show_default="random, or by the file"),
    ] = None
    dataset_path: Annotated[
        Path | None,
        _option(PROMPT_PANEL, "--dataset-path", metavar="FILE", help="File of a sharegpt or jsonl data set."),
    ] = None
    num_prompts: Annotated[
        int | None, _option(PROMPT_PANEL, "--num-prompts", min=1, help="Number of requests.", show_default="8")
    ] = None
    input_len: Annotated[
        int | None,
        _option(PROMPT_PANEL, "--input-len", min=1, help="Tokens of a generated prompt.", show_default="16"),
    ] = None
    output_len: Annotated[
        int | None,
        _option(
            PROMPT_PANEL,
            "--output-len",
            min=1,
            help="Tokens to generate; an end-of-text token does not end an answer.",
            show_default="what a jsonl entry says, else 16",
        ),
    ] = None
    prefix_len: Annotated[
        int | None,
        _option(
            PROMPT_PANEL,
            "--prefix-len",
            min=1,
            help="Shared tokens (shared-prefix).",
            show_default="half of the prompt",
        ),
    ] = None
    num_prefixes: Annotated[
        int | None,
        _option(PROMPT_PANEL, "--num-prefixes", min=1, help="Different shared beginnings.", show_default="1"),
    ] = None
    temperature: Annotated[
        float, _option(PROMPT_PANEL, "--temperature", help="At most 2; 0 or less takes the most likely token.")
    ] = 0.0
    seed: Annotated[
        int, _option(PROMPT_PANEL, "--seed", min=0, help="Of prompts, of open-loop gaps and of sampling.")
    ] = 0


@dataclass(frozen=True)
class LoadFlags:
    """When it is asked, and what counts as good."""

    concurrency: Annotated[
        int | None, _option(LOAD_PANEL, "--concurrency", min=1, help="Requests in flight.", show_default="4")
    ] = None
    request_rate: Annotated[
        float | None,
        _option(LOAD_PANEL, "--request-rate", help="Open loop: requests a second, whatever is still in flight."),
    ] = None
    burstiness: Annotated[
        float | None,
        _option(
            LOAD_PANEL,
            "--burstiness",
            help="Shape of the open loop's gaps: 1 is Poisson, less comes in bursts.",
            show_default="1.0",
        ),
    ] = None
    batch_sizes: Annotated[
        str | None,
        _option(LOAD_PANEL, "--batch-sizes", metavar="N,N,…", help="Sweep: batches of each size, one by one."),
    ] = None
    num_batches: Annotated[
        int | None,
        _option(LOAD_PANEL, "--num-batches", min=1, help="Batches of each size in a sweep.", show_default="3"),
    ] = None
    slo: Annotated[
        str | None,
        _option(
            LOAD_PANEL, "--slo", metavar="LIMITS", help="Adds goodput: ttft, tpot, e2e in ms, as in ttft:200,tpot:50."
        ),
    ] = None


@dataclass(frozen=True)
class ServerFlags:
    """Which server is measured instead of an engine."""

    url: Annotated[
        str | None, _option(SERVER_PANEL, "--url", metavar="URL", help="Measure this OpenAI-compatible server.")
    ] = None
    endpoint: Annotated[
        Literal["completions", "chat"] | None,
        _option(SERVER_PANEL, "--endpoint", help="Route that gets the load.", show_default="completions"),
    ] = None
    served_model_name: Annotated[
        str | None,
        _option(
            SERVER_PANEL, "--served-model-name", metavar="NAME", help="Model to ask for.", show_default="first listed"
        ),
    ] = None
    api_key: Annotated[
        list[str] | None, _option(SERVER_PANEL, "--api-key", metavar="KEY", help="Sent as bearer token.")
    ] = None


@dataclass(frozen=True)
class ResultFlags:
    """Where results go."""

    json: Annotated[
        str | None,
        _option(OUTPUT_PANEL, "--json", metavar="FILE", help="Write results as JSON; -: to stdout, tables to stderr."),
    ] = None
    plot: Annotated[
        Path | None, _option(OUTPUT_PANEL, "--plot", metavar="FILE", help="Draw into a .png, .svg or .pdf file.")
    ] = None
    plot_terminal: Annotated[
        bool, _option(OUTPUT_PANEL, "--plot-terminal", help="Draw in the terminal, below the tables.")
    ] = False
    output_token_ids: Annotated[
        Path | None,
        _option(
            OUTPUT_PANEL, "--output-token-ids", metavar="FILE", help="Write generated ids in submission order as JSON."
        ),
    ] = None
    compare: Annotated[
        tuple[Path, Path] | None,
        _option(OUTPUT_PANEL, "--compare", metavar="A B", help="Compare two result files; runs nothing."),
    ] = None


@dataclass(frozen=True)
class BenchEngineFlags(_options.EngineFlags):
    """The engine flags, with a batch as large as the load asks for."""

    max_num_seqs: Annotated[
        int | None,
        _option(
            _options.ENGINE_PANEL,
            "--max-num-seqs",
            min=1,
            help="Most sequences that run at a time.",
            show_default="what --concurrency needs, at least 8",
        ),
    ] = None


@_options.expands_flags
def bench(
    *,
    ctx: typer.Context,
    sources: _options.ModelFlags,
    synthetic: Annotated[
        bool, typer.Option("--synthetic", help="Measure a tiny random model instead, to try this command.")
    ] = False,
    prompts: PromptFlags,
    load: LoadFlags,
    server: ServerFlags,
    results: ResultFlags,
    engine: BenchEngineFlags,
    adapter: _options.AdapterFlags,
) -> None:
    """Measure throughput and latency of an engine in this process, or of a server with --url."""
    given = _Given(ctx)
    _check_results(results)
    if results.compare is not None:
        given.refuse_all_but("json", "plot", "plot_terminal", "compare", because="--compare runs nothing")
        _compare(results, results.compare)
        return
    subject = given.one_of(url=server.url, model=sources.model, synthetic=synthetic or None)
    plan = _plan(given, load)
    workload = _workload(given, prompts, plan)
    slo = _slo(load)
    if subject == "url":
        given.refuse(
            *_names(_options.ModelFlags, BenchEngineFlags, _options.AdapterFlags),
            because="--url measures a server with settings of its own",
        )
        if given.is_on_line("api_key") and len(server.api_key or []) > 1:
            raise UsageError("--api-key: given more than once", remedy="a request carries one key")
        runs, settings = _measure_server(server, results, workload, plan, slo)
    else:
        given.refuse("endpoint", "served_model_name", "api_key", because="it is for --url")
        keywords = {**sources.engine_keywords(), **engine.engine_keywords(), **adapter.engine_keywords()}
        keywords["max_num_seqs"] = _num_seqs(engine, plan)
        with _model_path(sources, is_synthetic=subject == "synthetic") as path:
            runs = asyncio.run(_measure(lambda: _engine_target(path, keywords, adapter.lora), workload, plan, slo))
        settings = {"target": "engine", "model": "synthetic" if subject == "synthetic" else path}
        settings |= _changed(engine) | _changed(sources)
        if adapter.lora is not None:
            settings["lora"] = adapter.lora
    _report(runs, results, {**settings, **_load_settings(workload, prompts, load, plan)}, workload)
    if any(run.summary.failed for run in runs):
        raise typer.Exit(ExitStatus.FAILURE)


class _Given:
    """Tells what the user said on the command line from what stands in the environment or a configuration file.

    Standing values are a user's own defaults: they give way to the command line, and rest where they have no use.
    """

    def __init__(self, ctx: typer.Context) -> None:
        self._on_line = [name for name in ctx.params if _is_on_line(ctx, name)]

    def is_on_line(self, name: str) -> bool:
        """Whether the command line has a value for `name`."""
        return name in self._on_line

    def one_of(self, **values: object) -> str | None:
        """The name of the value to use, of several that exclude each other; None if none is set.

        Raises:
            UsageError: two are set in the same place.
        """
        found = [name for name, value in values.items() if value is not None]
        found = [name for name in found if name in self._on_line] or found
        if len(found) > 1:
            raise UsageError(f"{_flag(found[1])}: excludes {_flag(found[0])}", remedy="give one of them")
        return found[0] if found else None

    def refuse(self, *names: str, because: str) -> None:
        """Refuse those of `names` that are on the command line.

        Raises:
            UsageError: naming the first one.
        """
        for name in self._on_line:
            if name in names:
                raise UsageError(f"{_flag(name)}: cannot be used here: {because}")

    def refuse_all_but(self, *names: str, because: str) -> None:
        """Refuse everything on the command line except `names`."""
        self.refuse(*(name for name in self._on_line if name not in names), because=because)


def _is_on_line(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _names(*classes: type) -> list[str]:
    return [field.name for cls in classes for field in fields(cls)]


def _changed(flags: _options.ModelFlags | BenchEngineFlags) -> dict[str, Setting]:
    """The flags that differ from their defaults."""
    defaults = asdict(type(flags)())
    return {name: value for name, value in asdict(flags).items() if value != defaults[name]}


def _plan(given: _Given, load: LoadFlags) -> Arrivals | Sweep:
    """How requests are sent.

    Raises:
        UsageError: two ways at once, a part of a way that is not used, or a value out of range.
    """
    from vkit.benchmark.arrivals import ClosedLoop, OpenLoop
    from vkit.benchmark.session import DEFAULT_CONCURRENCY, DEFAULT_NUM_BATCHES, Sweep

    way = given.one_of(concurrency=load.concurrency, request_rate=load.request_rate, batch_sizes=load.batch_sizes)
    if way != "request_rate":
        given.refuse("burstiness", because="it shapes the gaps of --request-rate")
    if way != "batch_sizes":
        given.refuse("num_batches", because="it belongs to --batch-sizes")
    if way == "batch_sizes":
        given.refuse("num_prompts", because="a sweep sends --num-batches batches of each size")
        return Sweep(_batch_sizes(load.batch_sizes or ""), load.num_batches or DEFAULT_NUM_BATCHES)
    if way == "request_rate":
        return OpenLoop(
            _positive("--request-rate", load.request_rate),
            _positive("--burstiness", 1.0 if load.burstiness is None else load.burstiness),
        )
    return ClosedLoop(load.concurrency or DEFAULT_CONCURRENCY)


def _positive(flag: str, value: float | None) -> float:
    if value is None or not 0 < value < math.inf:
        raise UsageError(f"{flag}: expected a finite number above 0, got {value}")
    return value


def _batch_sizes(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise UsageError(f"--batch-sizes: expected whole numbers of at least 1, as in 1,2,4; got {text!r}")
    sizes = tuple(map(int, parts))
    if len(set(sizes)) < len(sizes):
        raise UsageError(f"--batch-sizes: a size is given twice in {text!r}")
    return sizes


def _workload(given: _Given, flags: PromptFlags, plan: Arrivals | Sweep) -> Workload:
    """What is asked; a data set file is read here, before anything starts.

    Raises:
        UsageError: a flag that does not go with the data set, or a damaged file.
    """
    from vkit.benchmark.datasets import DatasetKind, kind_of_file, load_prompts, pick
    from vkit.benchmark.session import DEFAULT_INPUT_LEN, DEFAULT_NUM_PROMPTS, Sweep, Workload

    path = flags.dataset_path
    kind = DatasetKind(flags.dataset) if flags.dataset else kind_of_file(path) if path else DatasetKind.RANDOM
    if kind is not DatasetKind.SHARED_PREFIX:
        given.refuse("prefix_len", "num_prefixes", because="it belongs to --dataset shared-prefix")
    num_prompts = plan.num_requests if isinstance(plan, Sweep) else flags.num_prompts
    prompts = None
    if kind.is_file:
        given.refuse("input_len", because=f"the prompts of a {kind} file have their own lengths")
        if path is None:
            raise UsageError(f"--dataset: {kind} needs a file", remedy="give one with --dataset-path")
        loaded = load_prompts(kind, path)
        prompts = pick(loaded.prompts, num_prompts, DEFAULT_NUM_PROMPTS, where=str(path))
        for note in loaded.notes:
            _render.note(note)
    else:
        given.refuse("dataset_path", because=f"--dataset {kind} makes its prompts up")
    input_len = flags.input_len or DEFAULT_INPUT_LEN
    return Workload(
        prompts=prompts,
        num_prompts=len(prompts) if prompts else num_prompts or DEFAULT_NUM_PROMPTS,
        input_len=input_len,
        output_len=flags.output_len,
        prefix_len=_prefix_len(flags, input_len) if kind is DatasetKind.SHARED_PREFIX else 0,
        num_prefixes=flags.num_prefixes or 1,
        temperature=_temperature(flags.temperature),
        seed=flags.seed,
    )


def _prefix_len(flags: PromptFlags, input_len: int) -> int:
    prefix_len = flags.prefix_len or max(1, input_len // 2)
    if prefix_len >= input_len:
        raise UsageError(f"--prefix-len: {prefix_len} leaves nothing of the {input_len} tokens of --input-len")
    return prefix_len


def _temperature(value: float) -> float:
    if not -math.inf < value <= MAX_TEMPERATURE:
        raise UsageError(f"--temperature: expected a finite number of at most {MAX_TEMPERATURE:g}, got {value}")
    return max(0.0, value)


def _slo(load: LoadFlags) -> Slo | None:
    from vkit.benchmark.statistics import Slo

    return Slo.parse(load.slo) if load.slo is not None else None


def _num_seqs(engine: BenchEngineFlags, plan: Arrivals | Sweep) -> int:
    from vkit.benchmark.arrivals import OpenLoop
    from vkit.benchmark.session import Sweep

    if engine.max_num_seqs is not None:
        return engine.max_num_seqs
    if isinstance(plan, OpenLoop):
        return OPEN_LOOP_NUM_SEQS
    return max(MIN_NUM_SEQS, *plan.batch_sizes) if isinstance(plan, Sweep) else max(MIN_NUM_SEQS, plan.concurrency)


def _check_results(results: ResultFlags) -> None:
    """Refuse results that could not be written, before anything is measured.

    Raises:
        UsageError: no such folder, an unknown plot format, or a missing extra.
    """
    from vkit.benchmark.plots import check_plot_path, check_terminal_plot

    for flag, path in (("--json", results.json), ("--output-token-ids", results.output_token_ids)):
        if path is not None and str(path) != STDOUT and (not Path(path).parent.is_dir() or Path(path).is_dir()):
            raise UsageError(f"{flag}: {path}: expected a file in an existing folder")
    if results.plot is not None:
        check_plot_path(results.plot)
    if results.plot_terminal:
        check_terminal_plot()


@contextmanager
def _model_path(sources: _options.ModelFlags, *, is_synthetic: bool) -> Iterator[str]:
    """The checkpoint to run, on disk for as long as the context lasts."""
    if is_synthetic:
        from vkit.benchmark.synthetic import write_synthetic

        with TemporaryDirectory(prefix="vkit-synthetic-") as folder:
            yield str(write_synthetic(Path(folder)))
    else:
        from vkit import resolve_model

        yield str(
            resolve_model(sources.model, revision=sources.revision, download_dir=sources.download_dir, say=_render.note)
        )


def _engine_target(path: str, keywords: dict[str, Any], lora: str | None) -> Target:
    from vkit import EngineArgs

    args = EngineArgs(model=path, **keywords)  # contradictions end here, before torch is imported

    with starting():
        from vkit import AsyncLLM
        from vkit.benchmark.targets import EngineTarget

        with _render.load_progress(Path(path).name) as progress:
            return EngineTarget(AsyncLLM(args, on_load_progress=progress), lora)


def _measure_server(
    server: ServerFlags, results: ResultFlags, workload: Workload, plan: Arrivals | Sweep, slo: Slo | None
) -> tuple[list[MeasuredRun], dict[str, Setting]]:
    from vkit.benchmark.targets import Endpoint, HttpTarget
    from vkit.client import OpenAIClient, api_root

    address = api_root(server.url or "")
    keys = server.api_key or []
    endpoint = Endpoint(server.endpoint or Endpoint.COMPLETIONS)
    wants_token_ids = results.output_token_ids is not None

    def open_target() -> HttpTarget:
        client = OpenAIClient(address, api_key=keys[0] if keys else None)
        return HttpTarget(client, model=server.served_model_name, endpoint=endpoint, wants_token_ids=wants_token_ids)

    async def run() -> tuple[list[MeasuredRun], str | None]:
        target = open_target()
        return await _measure(lambda: target, workload, plan, slo), target.model

    runs, name = asyncio.run(run())
    return runs, {"target": "server", "url": address, "endpoint": str(endpoint), "model": name}


async def _measure(
    open_target: Callable[[], Target], workload: Workload, plan: Arrivals | Sweep, slo: Slo | None
) -> list[MeasuredRun]:
    from vkit.benchmark.progress import ProgressLine
    from vkit.benchmark.session import make_requests, measure

    target = open_target()
    try:
        for note in await target.start():
            _render.note(note)
        requests = await make_requests(target, workload)
        with ProgressLine(_render.console(stderr=True), len(requests)) as progress:
            runs = await measure(target, requests, plan, seed=workload.seed, slo=slo, observer=progress)
    finally:
        await target.close()
    for note in _notes(runs, requests, workload):
        _render.note(note)
    return runs


def _notes(runs: Sequence[MeasuredRun], requests: Sequence[Request], workload: Workload) -> Iterator[str]:
    """One line for each thing that did not go as asked."""
    records = [record for run in runs for record in run.records]
    failures = Counter(record.error for record in records if record.error is not None)
    for message, count in failures.most_common(MAX_ERRORS_SHOWN):
        yield f"{count} of {len(records)} requests failed: {message}"
    if len(failures) > MAX_ERRORS_SHOWN:
        yield f"{len(failures) - MAX_ERRORS_SHOWN} more kinds of failure"
    done = [record for record in records if record.error is None]
    estimated = sum(not record.is_split_exact for record in done)
    if estimated:
        yield f"{estimated} answers state only their sum of tokens: gaps between those are estimated from text lengths"
    preempted = sum(record.num_preemptions > 0 for record in done)
    if preempted:
        yield f"{preempted} requests were preempted: the KV cache holds less than the load; --num-blocks gives more"
    wanted = {request.index: request.max_tokens for request in requests}
    short = sum(record.output_tokens < wanted[record.index] for record in done)
    if short:
        yield f"{short} answers are shorter than asked for"
    mean_len = sum(record.input_tokens for record in done) / len(done) if done else 0.0
    if workload.prompts is None and done and abs(mean_len - workload.input_len) > LEN_TOLERANCE * workload.input_len:
        yield f"prompts have {mean_len:.1f} tokens on average, not {workload.input_len}: they are made of whole words"


def _load_settings(
    workload: Workload, prompts: PromptFlags, load: LoadFlags, plan: Arrivals | Sweep
) -> dict[str, Setting]:
    """What a result file says about how it was made."""
    from vkit.benchmark.datasets import kind_of_file
    from vkit.benchmark.session import Sweep

    is_made_up = workload.prompts is None
    settings: dict[str, Setting] = {
        "dataset": prompts.dataset or ("random" if is_made_up else str(kind_of_file(Path(str(prompts.dataset_path))))),
        "dataset_path": None if is_made_up else str(prompts.dataset_path),
        "input_len": workload.input_len if is_made_up else None,
        "output_len": workload.output_len,
        "prefix_len": workload.prefix_len or None,
        "num_prefixes": workload.num_prefixes if workload.prefix_len else None,
        "temperature": workload.temperature,
        "seed": workload.seed,
        "slo": load.slo,
    }
    if isinstance(plan, Sweep):
        settings |= {"batch_sizes": load.batch_sizes, "num_batches": plan.num_batches}
    else:
        settings |= {"num_prompts": workload.num_prompts, **asdict(plan)}
    return {name: value for name, value in settings.items() if value is not None}


def _report(runs: list[MeasuredRun], results: ResultFlags, settings: dict[str, Setting], workload: Workload) -> None:
    """Tables first, so that a file that cannot be written costs nobody their figures."""
    from vkit.benchmark.plots import run_panels, sweep_panels
    from vkit.benchmark.report import encode
    from vkit.benchmark.session import result_file, submitted_ids
    from vkit.benchmark.tables import summary_tables, sweep_table

    points = [(run.batch_size, run.summary) for run in runs if run.batch_size is not None]
    tables = [sweep_table(points)] if points else summary_tables(runs[0].summary)
    _show(tables, results, sweep_panels(points) if points else run_panels(runs[0].records), _title(settings))
    if results.json is not None:
        _write("--json", results.json, encode(result_file(runs, settings)))
    if results.output_token_ids is not None:
        _write("--output-token-ids", str(results.output_token_ids), encode(submitted_ids(runs)))


def _title(settings: dict[str, Setting]) -> str:
    loop = next(
        (
            f"{name.replace('_', ' ')} {settings[name]}"
            for name in ("concurrency", "request_rate", "batch_sizes")
            if name in settings
        ),
        "",
    )
    return f"{Path(str(settings['model'])).name}, {settings['dataset']} prompts, {loop}"


def _compare(results: ResultFlags, paths: tuple[Path, Path]) -> None:
    from vkit.benchmark.plots import comparison_panels
    from vkit.benchmark.report import compare, encode, read_result
    from vkit.benchmark.tables import comparison_tables

    found = [(str(path), read_result(path)) for path in paths]
    comparison = compare(found[0][1], found[1][1], names=(found[0][0], found[1][0]))
    _show(comparison_tables(comparison), results, comparison_panels(found), " and ".join(name for name, _ in found))
    if results.json is not None:
        _write("--json", results.json, encode(comparison))


def _show(tables: Sequence[Table], results: ResultFlags, panels: Sequence[Panel], title: str) -> None:
    """Tables and terminal plots to stdout, or to stderr where stdout carries JSON; the plot file last."""
    from vkit.benchmark.plots import save_plot, terminal_plot

    console = _render.console(stderr=results.json == STDOUT)
    for table in tables:
        # A pipe has no width; lines must not be cut for it.
        console.print(table, width=None if console.is_terminal else PIPE_WIDTH, soft_wrap=False)
    if results.plot_terminal and panels:
        text = terminal_plot(panels, console.width, has_colour=console.is_terminal and not console.no_color)
        console.file.write(text + "\n")
    if results.plot is not None and panels:
        save_plot(panels, results.plot, title)


def _write(flag: str, path: str, text: str) -> None:
    if path == STDOUT:
        sys.stdout.write(text)
        return
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise VkitError(f"{flag}: {path}: {error.strerror or error}") from error
