# The command `fsdp` for NVIDIA GPUs, and torchrun: the wheels `fsdp` and `fsdp-cuda` with the torch that they name.
#
# The context is a folder with both wheels. Of NVIDIA's images this is the smallest: torch brings its own libraries of CUDA,
# as wheels, and needs only what lets the driver in. The digest is that of the tag in front of it; Dependabot keeps both.
FROM nvidia/cuda:13.0.2-base-ubuntu24.04@sha256:605fb0c8acf8674e164d822da8a8521f3a655056e569f0899e72ae940e1fe7dc

# python3 is that of the distribution, whatever its last revision.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*

# What torch needs comes from PyPI; `fsdp` and `fsdp-cuda` only from the context. The interpreter's own bytecode is made once.
RUN --mount=type=bind,target=/wheels \
    python3 -m venv /opt/fsdp \
    && /opt/fsdp/bin/pip install --no-cache-dir /wheels/fsdp-*.whl /wheels/fsdp_cuda-*.whl \
    && /opt/fsdp/bin/fsdp --version
ENV PATH=/opt/fsdp/bin:$PATH

LABEL org.opencontainers.image.title="fsdp-cuda" \
      org.opencontainers.image.description="Fully sharded data parallel training, verification and checkpoints, on NVIDIA GPUs" \
      org.opencontainers.image.licenses="MIT OR Apache-2.0"

# `ubuntu`, which is in the image.
USER 1000
WORKDIR /data
ENTRYPOINT ["fsdp"]
CMD ["--help"]
