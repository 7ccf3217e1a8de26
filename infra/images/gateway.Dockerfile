# The gateway: HTTP for clients, gRPC for sites. No torch, no compiler, no shell user. Build from the top of the repository:
#
#   docker build --file infra/images/gateway.Dockerfile --build-arg PYTHON=docker.io/library/python:3.11-slim-bookworm@sha256:… .
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
RUN /opt/mico/bin/pip install --constraint constraints.txt ".[postgres,otel,aws]"

FROM ${PYTHON}
LABEL org.opencontainers.image.title="mico gateway" org.opencontainers.image.licenses="Apache-2.0"
RUN useradd --uid 10001 --home-dir /var/lib/mico --create-home --shell /usr/sbin/nologin mico
COPY --from=build /opt/mico /opt/mico
ENV PATH=/opt/mico/bin:$PATH PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /var/lib/mico
EXPOSE 8080 8081 9080
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s --retries=3 \
  CMD ["python", "-c", "import urllib.request as http; http.urlopen('http://127.0.0.1:8080/health', timeout=2)"]
ENTRYPOINT ["mico"]
CMD ["gateway"]
