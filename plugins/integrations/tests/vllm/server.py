"""A server of vLLM with its real engine and workers, and its real routes for updates of weights.

``python server.py PORT MODEL SIZE`` serves the Hugging Face model in a directory, with a tensor-parallel group of
workers. ``POST /generate {"tokens": [...]}`` returns the next tokens. The whole server of vLLM needs more libraries.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Annotated

PORT, MODEL, SIZE = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1"
)

import uvicorn
from fastapi import Body, FastAPI
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

try:
    from vllm.entrypoints.rl.online.api_router import router
except ImportError:  # before 0.29
    from vllm.entrypoints.serve.dev.rlhf.api_router import router


def end(signum: int, frame: object) -> None:
    """End this process and the processes of vLLM, which otherwise continue after an error."""
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Serve until the process is terminated."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, end)
    arguments = AsyncEngineArgs(
        model=MODEL,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=32,
        tensor_parallel_size=SIZE,
        weight_transfer_config={"backend": "ckptcore"},
    )
    engine = AsyncLLM.from_engine_args(arguments)
    app = FastAPI()
    app.include_router(router)
    app.state.engine_client = engine

    @app.post("/generate")  # type: ignore[untyped-decorator]
    async def generate(tokens: Annotated[list[int], Body(embed=True)]) -> dict[str, list[int]]:
        parameters = SamplingParams(max_tokens=8, temperature=0, detokenize=False)
        outputs = [
            output async for output in engine.generate({"prompt_token_ids": tokens}, parameters, os.urandom(8).hex())
        ]
        return {"tokens": list(outputs[-1].outputs[0].token_ids)}

    signal.signal(signal.SIGTERM, end)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=PORT, log_level="error"))
    thread = threading.Thread(target=server.run)  # in the main thread it would replace the handler
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
