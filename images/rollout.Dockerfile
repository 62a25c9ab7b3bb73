# Generation with SGLang 0.5.17, and reward models, on AWS's own container. From the repository's root:
#   docker build -f images/rollout.Dockerfile -t registry.example.com/moe-rl/rollout:0.1.0 .
# Dependencies only, never the project. Torch, SGLang, NCCL, EFA and DeepEP are the base's: sgl-kernel is tied to its
# torch 2.11, so nothing here may move them, and the last step refuses an image in which something did.
ARG BASE=public.ecr.aws/deep-learning-containers/sglang:server-cuda-v1.3
# hadolint ignore=DL3006
FROM ${BASE}

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
RUN --mount=type=bind,source=pyproject.toml,target=/build/pyproject.toml \
    --mount=type=bind,source=images/requirements.py,target=/build/requirements.py \
    --mount=type=bind,source=images/verify.py,target=/build/verify.py \
    pip list --format freeze | grep -E '^(torch|transformers|sglang|sgl-kernel|sglang-kernel|nvidia-)' \
        > /constraints.txt \
    && python /build/requirements.py /build/pyproject.toml --extras train,report \
        --without torch,transformers,tokenizers > /requirements.txt \
    && pip install --no-cache-dir --constraint /constraints.txt -r /requirements.txt \
    && rm /requirements.txt /constraints.txt \
    && python /build/verify.py torch=2.11.0 sglang=0.5.17 nccl=2.30.4 deep_ep=1.2.1

# The base starts a server with whatever arguments it gets; Flyte sends arguments and no command.
ENTRYPOINT []
ENV PYTHONPATH=/root:/root/kernels \
    PYTHONUNBUFFERED=1
WORKDIR /root
