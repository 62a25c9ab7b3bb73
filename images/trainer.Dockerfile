# Policy training over EFA with DeepEP 2: PyTorch 2.12.1, CUDA 13.0, one NCCL. From the repository's root:
#   docker build -f images/trainer.Dockerfile -t registry.example.com/moe-rl/trainer:0.1.0 .
# Dependencies only, never the project: Flyte unpacks the code that was registered into /root.
ARG BASE=public.ecr.aws/deep-learning-containers/pytorch:2.12-cu130-amzn2023

# hadolint ignore=DL3006
FROM ${BASE} AS network
ARG EFA_INSTALLER=1.50.0
ARG GDRCOPY=2.5.2
ARG NCCL=2.31.2
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# The base's installer 1.47 has OFI plugin 1.19; GIN over EFA begins with 1.21, which is in 1.50 (1.49 has 1.20).
# The kernel module belongs to the node's AMI.
WORKDIR /build/efa
RUN curl -fsSL "https://efa-installer.amazonaws.com/aws-efa-installer-${EFA_INSTALLER}.tar.gz" \
        | tar xz --strip-components 1 \
    && ./efa_installer.sh -y --skip-kmod --skip-limit-conf --no-verify --disable-ngc \
    && git clone --depth 1 --branch "v${GDRCOPY}" https://github.com/NVIDIA/gdrcopy.git /build/gdrcopy \
    && make -C /build/gdrcopy prefix=/usr/local lib_install \
    && rm -rf /build/efa/* /build/gdrcopy
# DeepEP ends the process when two libnccl are mapped: the wheel that torch loads stays, every other goes.
RUN find / -xdev -name 'libnccl*.so*' -not -name 'libnccl-*' -not -path '*/nvidia/nccl/*' -delete \
    && pip uninstall --yes nvidia-nccl-cu12 \
    && pip install --no-cache-dir --no-deps "nvidia-nccl-cu13==${NCCL}"

FROM network AS deepep
ARG DEEP_EP_SOURCE=https://github.com/amazon-contributing/DeepEP
ARG DEEP_EP_COMMIT=874779c
# Hopper and Blackwell; kernels are compiled at run time, so nvcc stays in the image below.
ENV TORCH_CUDA_ARCH_LIST="9.0;10.0"
WORKDIR /build/DeepEP
RUN git clone "${DEEP_EP_SOURCE}" . \
    && git checkout "${DEEP_EP_COMMIT}" \
    && git submodule update --init --recursive \
    && pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels .

FROM network
COPY --from=deepep /wheels /wheels
RUN --mount=type=bind,source=pyproject.toml,target=/build/pyproject.toml \
    --mount=type=bind,source=images/requirements.py,target=/build/requirements.py \
    --mount=type=bind,source=images/verify.py,target=/build/verify.py \
    python /build/requirements.py /build/pyproject.toml --extras train,report --without torch > /requirements.txt \
    && echo "torch==2.12.1" > /constraints.txt \
    && pip install --no-cache-dir --constraint /constraints.txt -r /requirements.txt \
    && pip install --no-cache-dir --no-deps /wheels/*.whl \
    && rm -rf /wheels /requirements.txt /constraints.txt \
    && python /build/verify.py torch=2.12.1 nccl=2.31.2 deep_ep=2.0.0 \
        --plugin /opt/amazon/ofi-nccl/lib64/libnccl-net-ofi.so \
        --extension "$(python -c 'import importlib.util as u, pathlib as p; print(next(p.Path(u.find_spec("deep_ep").origin).parent.glob("_C*.so")))')"

ENV LD_LIBRARY_PATH=/opt/amazon/ofi-nccl/lib64:/opt/amazon/efa/lib64:${LD_LIBRARY_PATH} \
    PYTHONPATH=/root:/root/kernels \
    PYTHONUNBUFFERED=1
WORKDIR /root
ENTRYPOINT []
