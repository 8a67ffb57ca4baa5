"""In: the command line. Out: a running server, a rendered film, or a report on this machine.

Heavy modules are imported by the command that needs them, so that a mistake is told at once.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import re
import shlex
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from characters_serve import logs
from characters_serve.config import Config, ConfigError, ServerConfig, load_config

log = logging.getLogger(__name__)

EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_GATE = 3
SHUTDOWN_REQUESTS_S = 5


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    # It would write a line for each malformed byte that a stranger sends.
    logging.getLogger("python_multipart").setLevel(logging.ERROR)
    try:
        config = load_config(options.config, options.set)
        logs.configure(config.server.log_format, level=options.log_level.upper())
        command: Callable[[Config, argparse.Namespace], int] = options.command
        return command(config, options)
    except ConfigError as error:
        return _fail(explain(error), EXIT_CONFIG)
    except KeyboardInterrupt:
        return 130


def explain(error: ConfigError) -> str:
    """One line for each mistake: where it is, and what is wrong with it."""
    cause = error.__cause__
    if not isinstance(cause, ValidationError):
        return str(error)
    lines = []
    for mistake in cause.errors(include_url=False, include_context=False):
        field = ".".join(str(part) for part in mistake["loc"])
        message = mistake["msg"].removeprefix("Value error, ")
        if mistake["type"] == "extra_forbidden":
            message = "there is no such setting"
        elif mistake["type"] == "tuple_type":
            message = "should be a list: [a, b]"
        lines.append(f"{field}: {message}" if field else message)
    return "; ".join(lines)


def serve(config: Config, _options: argparse.Namespace) -> int:
    import uvicorn

    from characters_serve.gateway.app import create_app
    from characters_serve.gateway.drain import DrainingServer
    from characters_serve.gateway.external import MAX_FRAME_BYTES

    server_config = config.server
    check_exposure(server_config)
    try:
        listener = _listen(server_config.host, server_config.port)
    except OSError as error:
        return _fail(
            f"server.port: cannot listen on {server_config.host}:{server_config.port}: "
            f"{error.strerror or error}; choose another with --set server.port=...",
            EXIT_CONFIG,
        )
    url = _url(server_config.host, listener.getsockname()[1])
    announced: list[str] = []

    def on_ready(_details: dict[str, str]) -> None:
        if not announced:
            announced.append(url)
            _say(f"\nOpen {url}\n")

    mistakes: list[str] = []

    def on_misconfigured(reason: str) -> None:
        mistakes.append(reason)
        server.should_exit = True

    app = create_app(config, on_ready=on_ready, on_misconfigured=on_misconfigured)
    if not _is_local(server_config.host):
        if not server_config.has_key:
            log.warning(
                "anyone who reaches %s can start a session; set %s to require a key",
                url,
                server_config.api_key_env,
            )
        log.info("browsers give a microphone to https and localhost pages only")
    _say(f"Starting {config.model.name}; the page at {url} already loads.")
    server = DrainingServer(
        uvicorn.Config(
            app,
            log_config=None,
            log_level="error",  # it warns of each malformed request that a stranger sends
            access_log=False,
            server_header=False,
            lifespan="on",
            timeout_graceful_shutdown=SHUTDOWN_REQUESTS_S,
            ws_max_size=MAX_FRAME_BYTES,
            # 256 KB of compressed frames, read at once, can be 256 MB of sound.
            ws_per_message_deflate=False,
            # A voice agent that is held back answers pings only once its sound is read.
            ws_ping_timeout=None,
        ),
        app.state.gateway.drain,
    )
    with contextlib.suppress(KeyboardInterrupt):  # passed on once everything has stopped
        server.run(sockets=[listener])
    if mistakes:
        return _fail(f"no group can start: {mistakes[0]}", EXIT_CONFIG)
    return 0 if server.started else EXIT_FAILED


def check_exposure(server: ServerConfig) -> None:
    """Whoever reaches a server without a key can use its processors and its chat account."""
    if _is_local(server.host) or server.allow_keyless or server.has_key:
        return
    raise ConfigError(
        f"server.host: {server.host} can be reached from other machines, and {server.api_key_env} "
        "is not set; set it, listen on 127.0.0.1, or say server.allow_keyless=true"
    )


def render(config: Config, options: argparse.Namespace) -> int:
    from characters_serve.render import run_render

    try:
        run_render(config, options.image, options.audio, options.out, options.seed)
    except (OSError, ValueError) as error:
        return _fail(str(error), EXIT_FAILED)
    print(options.out)
    return 0


def simulate(config: Config, options: argparse.Namespace) -> int:
    import json

    from characters_serve.fleet.layout import CannotPlace, uniform_host
    from characters_serve.fleet.simulate import Timing, draw, generate_trace, read_trace
    from characters_serve.fleet.simulate import simulate as run

    server, fleet = config.server, config.fleet
    timing = Timing(
        queue_size=server.queue_size,
        patience_s=server.queue_timeout_s,
        reserve_ttl_s=fleet.reserve_ttl_s,
    )
    hosts = [
        uniform_host(f"host{n}", options.gpus, fleet.nvlink_gpus) for n in range(options.hosts)
    ]
    try:
        visits = (
            read_trace(options.trace)
            if options.trace
            else generate_trace(
                options.sessions,
                options.hours,
                options.median_s,
                options.sigma,
                config.session.max_duration_s,
                options.seed,
            )
        )
        paid_s = 0.0 if options.trace else 3600 * options.hours
        outcome, course = run(visits, hosts, config.group_shape, timing, options.price, paid_s)
        if options.plot:
            draw(course, outcome, options.plot)
    except (OSError, CannotPlace, ValueError, MemoryError) as error:
        return _fail(str(error), EXIT_FAILED)
    except ImportError:
        return _fail("--plot needs matplotlib: pip install 'characters-serve[plot]'", EXIT_FAILED)
    print(outcome.table())
    print(json.dumps(outcome.as_dict()))
    return 0


def doctor(config: Config, _options: argparse.Namespace) -> int:
    from characters_serve.doctor import examine

    findings = examine(config)
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        mark = "  " if finding.good else "! "
        print(f"{mark}{finding.subject:<{width}}  {finding.words}")
    return 0 if all(finding.good for finding in findings) else EXIT_FAILED


def convert(config: Config, options: argparse.Namespace) -> int:
    from characters_serve.model.open.convert import LIVE_AVATAR_ALPHA
    from characters_serve.model.open.convert import convert as convert_checkpoint
    from characters_serve.model.weights import WeightsError

    if config.model.family != options.family:
        raise ConfigError(
            f"model.family: the configuration is of {config.model.family}, not {options.family}; "
            "name the model's file with --config"
        )
    _check_lora(options)
    try:
        convert_checkpoint(
            config.model,
            options.source,
            options.destination,
            lora=options.lora,
            lora_alpha=options.lora_alpha or LIVE_AVATAR_ALPHA,
            vae=options.vae,
        )
    except (OSError, WeightsError) as error:
        return _fail(str(error), EXIT_FAILED)
    print(f"--set model.weights={options.destination}")
    return 0


def _check_lora(options: argparse.Namespace) -> None:
    """What no file tells, and nobody would notice: a base without its LoRA, another scale."""
    if options.family == "live_avatar" and options.lora is None and not options.merged:
        raise ConfigError(
            "--lora: the base model alone is not LiveAvatar; name its LoRA "
            "(liveavatar.safetensors), or say --merged of a source that has it"
        )
    if options.family == "causal_wan" and options.lora and options.lora_alpha is None:
        raise ConfigError("--lora-alpha: it is not in the LoRA's file; LongLive's is 256")


def embed_text(config: Config, options: argparse.Namespace) -> int:
    from characters_serve.engine.device import choose_device
    from characters_serve.model.open import text

    if config.model.wan is None:
        raise ConfigError("model.wan: the configuration's model takes no text; see --config")
    try:
        device, dtype = choose_device(config.engine)
        rows = text.embed_text(
            options.encoder, options.prompt, config.model.wan, device=device, dtype=dtype
        )
        text.save_text(rows, options.out)
    except (OSError, ValueError) as error:
        return _fail(str(error), EXIT_FAILED)
    print(f"--set model.wan.text_embedding={options.out}")
    return 0


def evaluate(_config: Config, options: argparse.Namespace) -> int:
    import importlib.util
    import json

    from characters_serve.bench.origin import origin
    from characters_serve.evaluation.report import draw, make_report
    from characters_serve.evaluation.run import Plan, default_jobs
    from characters_serve.evaluation.run import evaluate as run

    configurations = dict(_named_config(text, options.set or []) for text in options.compare)
    if len(configurations) < len(options.compare):
        raise ConfigError("--config: two configurations have one name")
    if options.gate and not options.reruns and options.band is None:
        raise ConfigError("--gate: a band is needed: --band, or --reruns to find one")
    plan = Plan(
        configurations,
        options.out,
        clips=options.clips,
        reruns=options.reruns,
        seconds=options.seconds,
        window_s=options.window,
        syncnet=options.syncnet,
        pictures=options.pictures,
        recordings=options.speech,
        jobs=options.jobs or default_jobs(),
    )
    try:
        report = make_report(plan, run(plan), options.band)
    except (OSError, ValueError) as error:
        return _fail(str(error), EXIT_FAILED)
    scorer = (
        "the published SyncNet"
        if options.syncnet
        else "this project's own SyncNet, not comparable with published values"
    )
    title = f"{plan.clips} clips of {plan.seconds:g} s; {scorer}"
    print(f"{title}\n{report.table()}")
    result: dict[str, Any] = {"scorer": scorer, "clips": plan.clips, "seconds": plan.seconds}
    result |= origin() | report.as_dict()
    (plan.out / "report.json").write_text(json.dumps(result, indent=1) + "\n")
    if importlib.util.find_spec("matplotlib"):
        draw(report, title, plan.out / "report.png")
    else:
        print("no picture: pip install 'characters-serve[plot]'")
    for words in result["failures"]:
        print(words)
    print(json.dumps(result))
    return EXIT_GATE if options.gate and result["failures"] else 0


def _named_config(text: str, common: list[str]) -> tuple[str, Config]:
    """NAME=, then YAML files and A.B=VALUE settings between spaces, as a shell splits them."""
    name, equals, rest = text.partition("=")
    if not equals or not re.fullmatch(r"[\w.-]+", name):
        raise ConfigError(f"--config {text}: expected NAME=FILE, or NAME='FILE A.B=VALUE'")
    words = shlex.split(rest)
    files = [Path(word) for word in words if "=" not in word]
    return name, load_config(files, [*common, *(word for word in words if "=" in word)])


def bench(_config: Config, options: argparse.Namespace) -> int:
    if options.what == "turns":
        from characters_serve.bench import turns

        return turns.main(options.arguments)
    from characters_serve.bench import waterfall

    return waterfall.main(options.what, options.arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="characters", description="A real-time server for talking characters."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    common = _common_options()
    command = commands.add_parser("serve", parents=[common], help="run the server and its page")
    command.set_defaults(command=serve)
    command = commands.add_parser("render", parents=[common], help="one image and speech to an MP4")
    _render_options(command)
    command = commands.add_parser(
        "convert", parents=[common], help="published weights of an open model to a folder of ours"
    )
    _convert_options(command)
    command = commands.add_parser(
        "embed-text", parents=[common], help="a prompt to the file that an open model reads"
    )
    _embed_text_options(command)
    command = commands.add_parser(
        "simulate", parents=[common], help="a day's traffic on a fleet: who waits, what it costs"
    )
    _simulate_options(command)
    command = commands.add_parser(
        "eval", help="lip-sync of configurations, compared over the same clips"
    )
    _evaluate_options(command)
    command = commands.add_parser("doctor", parents=[common], help="what this machine can run")
    command.set_defaults(command=doctor)
    command = commands.add_parser("bench", help="time spoken turns, or the step and its kernels")
    _bench_options(command)
    return parser


def config_options() -> argparse.ArgumentParser:
    """What `load_config` takes; a parent of each parser that builds a configuration."""
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument(
        "--config",
        action="append",
        type=Path,
        metavar="FILE",
        help="a YAML file; later files win. Without one: the embedded character",
    )
    options.add_argument(
        "--set", action="append", metavar="A.B=VALUE", help="one setting, over the files"
    )
    return options


def _common_options() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False, parents=[config_options()])
    common.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info"
    )
    return common


def _render_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--image", type=Path, required=True, help="PNG, JPEG or WebP of the face")
    command.add_argument("--audio", type=Path, required=True, help="any file with speech in it")
    command.add_argument("--out", type=Path, required=True, help="the MP4 to write")
    command.add_argument("--seed", type=int, default=0, help="of the idle motion and the noise")
    command.set_defaults(command=render)


def _convert_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--family", choices=["live_avatar", "causal_wan"], required=True)
    lora = command.add_mutually_exclusive_group()
    lora.add_argument("--lora", type=Path, metavar="FILE", help="merged into the weights")
    lora.add_argument("--merged", action="store_true", help="LiveAvatar: the source has its LoRA")
    command.add_argument("--lora-alpha", type=float, help="LiveAvatar: 64; LongLive: 256")
    command.add_argument("--vae", type=Path, metavar="FILE", help="of model.decoder, as published")
    command.add_argument("source", type=Path, help="the checkpoint: a file, or its folder")
    command.add_argument("destination", type=Path, help="the folder to write")
    command.set_defaults(command=convert)


def _embed_text_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--prompt", required=True)
    command.add_argument("encoder", type=Path, help="the folder of umt5-xxl")
    command.add_argument("out", type=Path, help="the safetensors file to write")
    command.set_defaults(command=embed_text)


def _simulate_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--hosts", type=_positive, default=1, metavar="N")
    command.add_argument("--gpus", type=_positive, default=8, metavar="N", help="of each host")
    command.add_argument("--price", type=_amount, metavar="PRICE", help="of one GPU for an hour")
    command.add_argument(
        "--trace", type=Path, metavar="FILE", help="CSV of arrival_s,duration_s; else drawn from:"
    )
    command.add_argument("--sessions", type=_amount, default=1000, help="on average, in all")
    command.add_argument("--hours", type=_amount, default=24, help="from midnight on")
    command.add_argument("--median-s", type=_amount, default=180, help="of a session's duration")
    command.add_argument("--sigma", type=_amount, default=0.8, help="of its logarithm")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--plot", type=Path, metavar="PNG", help="needs the extra `plot`")
    command.set_defaults(command=simulate)


def _evaluate_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--config",
        dest="compare",
        action="append",
        required=True,
        metavar="NAME='FILE A.B=VALUE'",
        help="a configuration: YAML files and settings. The first is what the others are held to",
    )
    command.add_argument("--set", action="append", metavar="A.B=VALUE", help="in all of them")
    command.add_argument("--out", type=Path, required=True, help="folder; a second run goes on")
    command.add_argument("--clips", type=_positive, default=51, metavar="N")
    command.add_argument("--seconds", type=float, default=5.0, help="of each clip")
    command.add_argument(
        "--reruns", type=int, default=4, metavar="N", help="of the first, for what chance does"
    )
    command.add_argument(
        "--window", type=float, default=10.0, metavar="S", help="long clips are scored by these too"
    )
    command.add_argument("--syncnet", type=Path, help="published weights; else this project's own")
    command.add_argument("--pictures", type=Path, help="a folder, in place of the presets")
    command.add_argument("--speech", type=Path, help="a folder of recordings; else the own voice")
    command.add_argument("--jobs", type=_positive, help="processes; else one for each CPU core")
    command.add_argument(
        "--gate", action="store_true", help=f"exit {EXIT_GATE} where an interval leaves the band"
    )
    command.add_argument("--band", type=float, help="allowed of either score; else from the reruns")
    command.set_defaults(command=evaluate, config=None, log_level="info")


def _bench_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("what", choices=("turns", "step", "waterfall", "kernels"))
    command.add_argument("arguments", nargs=argparse.REMAINDER, help="see: bench WHAT --help")
    command.set_defaults(command=bench, config=None, set=None, log_level="info")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _amount(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError("must be more than 0")
    return number


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=2048)


def _url(host: str, port: int) -> str:
    """An address that can be opened on this machine."""
    if host in ("0.0.0.0", "::", ""):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _is_local(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _say(words: str) -> None:
    """A terminal that was closed, or a full disk behind it, ends no server."""
    with contextlib.suppress(OSError):
        print(words, flush=True)


def _fail(message: str, code: int) -> int:
    print(f"characters: {message}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
