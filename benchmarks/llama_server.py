"""llama-server with or without llama.cpp's own DFlash, from the wheel ``xllamacpp`` (in an environment of its own).

    python benchmarks/llama_server.py TARGET.gguf [--port P] [--drafter DFLASH.gguf --n-max K] [-c N] [-t N]

For ``dspine-local bench --endpoint``. The drafter is one of llama.cpp's architecture ``dflash``: write_dflash_gguf in
llama_dflash.py makes it of ours. Runs until interrupted.
"""

from __future__ import annotations

import argparse
import signal

import xllamacpp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--port", type=int, default=8081)
    parser.add_argument("--drafter")
    parser.add_argument("--n-max", type=int, default=7, help="tokens drafted per round (default: 7)")
    parser.add_argument("-c", dest="n_ctx", type=int, default=4096)
    parser.add_argument("-t", dest="n_threads", type=int, default=2)
    args = parser.parse_args()

    params = xllamacpp.CommonParams()
    params.model.path = args.target
    params.n_ctx, params.n_parallel, params.port = args.n_ctx, 1, args.port
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = args.n_threads
    if args.drafter:
        draft = params.speculative.draft
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_DFLASH]
        draft.mparams.path = args.drafter
        draft.n_max = args.n_max
        draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = args.n_threads
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
