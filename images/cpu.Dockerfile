# Environments, buffer and graph tasks: no GPU. Build from the repository's root:
#   docker build -f images/cpu.Dockerfile -t registry.example.com/moe-rl/cpu:0.1.0 .
# Dependencies only, never the project: Flyte unpacks the code that was registered into /root.
ARG BASE=python:3.12.12-slim-bookworm
# hadolint ignore=DL3006
FROM ${BASE}

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
RUN --mount=type=bind,source=pyproject.toml,target=/build/pyproject.toml \
    --mount=type=bind,source=images/requirements.py,target=/build/requirements.py \
    python /build/requirements.py /build/pyproject.toml --extras train,report --without torch > /requirements.txt \
    && pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu "torch==2.12.1+cpu" \
        -r /requirements.txt \
    && rm /requirements.txt

ENV PYTHONPATH=/root:/root/kernels \
    PYTHONUNBUFFERED=1
WORKDIR /root
ENTRYPOINT []
