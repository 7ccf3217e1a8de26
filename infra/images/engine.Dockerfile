# A site: one model on this machine's GPUs, no port. torch's wheels bring CUDA, so the host needs the driver alone. No compiler:
# the little C that Triton needs is compiled in the build (triton_glue.py); its kernels are compiled by Triton itself.
# Build from the top of the repository:
#
#   docker build --file infra/images/engine.Dockerfile --build-arg PYTHON=docker.io/library/python:3.11-slim-bookworm@sha256:… .
#
# KERNELS names folders with the config.json of models whose kernels the image has compiled, for A100, H100 and H200; those of
# others are compiled at a site's first start.
#
# PYTHON has no default on purpose: whoever builds names the base by a digest that they have checked.
ARG PYTHON

FROM ${PYTHON} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ONLY_BINARY=:all:
# indexes of packages, other than the public one
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
RUN python -m venv /opt/mico
WORKDIR /source
COPY . .
RUN /opt/mico/bin/pip install --constraint constraints.txt ".[engine]" \
  && ln -s "$(/opt/mico/bin/python -I -c 'from mico.demo_model import FOLDER; print(FOLDER)')" /opt/mico/demo-model
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN TRITON_CACHE_DIR=/opt/triton /opt/mico/bin/python infra/images/triton_glue.py
ARG KERNELS="bench/models/llama-3.1-8b bench/models/qwen2.5-0.5b"
# hadolint ignore=SC2086
RUN for architecture in 80 90; do TRITON_CACHE_DIR=/opt/triton TRITON_STORE_BINARY_ONLY=1 \
  /opt/mico/bin/python -I -m site_engine.engine.precompile "$architecture" $KERNELS || exit 1; done

FROM ${PYTHON}
LABEL org.opencontainers.image.title="mico engine" org.opencontainers.image.licenses="Apache-2.0"
RUN useradd --uid 10001 --home-dir /var/lib/mico --create-home --shell /usr/sbin/nologin mico
COPY --from=build /opt/mico /opt/mico
COPY --from=build --chown=10001:10001 /opt/triton /opt/triton
COPY infra/images/linked.py /opt/mico/linked.py
ENV PATH=/opt/mico/bin:$PATH PYTHONUNBUFFERED=1 TRITON_CACHE_DIR=/opt/triton NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
WORKDIR /var/lib/mico
HEALTHCHECK --interval=30s --timeout=3s --start-period=15m --retries=4 CMD ["python", "/opt/mico/linked.py"]
ENTRYPOINT ["mico"]
CMD ["site"]
