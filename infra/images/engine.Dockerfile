# A site: one model on this machine's GPUs, no port. torch's wheels bring CUDA, so the host needs the driver alone.
# gcc is here for Triton, which compiles the C that calls the driver when a site first starts: it can't be built without
# a driver, and none is there when an image is built. It is 0.2 GB beside torch's 5, and a site has no port.
# Build from the top of the repository:
#
#   docker build --file infra/images/engine.Dockerfile --build-arg PYTHON=docker.io/library/python:3.11-slim-bookworm@sha256:… .
#
# PYTHON has no default on purpose: whoever builds names the base by a digest that they have checked.
ARG PYTHON

FROM ${PYTHON} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ONLY_BINARY=:all:
RUN python -m venv /opt/mico
WORKDIR /source
COPY . .
RUN /opt/mico/bin/pip install --constraint constraints.txt ".[engine,otel]"

FROM ${PYTHON}
LABEL org.opencontainers.image.title="mico engine"
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 10001 --home-dir /var/lib/mico --create-home --shell /usr/sbin/nologin mico
COPY --from=build /opt/mico /opt/mico
COPY infra/images/linked.py /opt/mico/linked.py
ENV PATH=/opt/mico/bin:$PATH PYTHONUNBUFFERED=1 NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
WORKDIR /var/lib/mico
HEALTHCHECK --interval=30s --timeout=3s --start-period=15m --retries=4 CMD ["python", "/opt/mico/linked.py"]
ENTRYPOINT ["mico"]
CMD ["site"]
