# One image for all services:  docker run IMAGE draft|verify|coordinator|http FLAGS
#
#   docker build -t specwire:0.1.0 .                                   CPU, about 2 GB
#   docker build -t specwire:0.1.0-cuda --build-arg TORCH=cuda .       CUDA, several GB more
#
# What pip takes from an index is locked with hashes in requirements/. `make images` writes the base's digest.
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS build
ARG TORCH=cpu
# PyPI's wheels of torch include CUDA; those for the CPU have an index of their own.
ARG TORCH_CPU_INDEX_URL=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_DEPS=1
RUN python -m venv /opt/specwire
ENV PATH=/opt/specwire/bin:$PATH
WORKDIR /src
# torch first and by itself: it changes rarely, and its layer is most of the image.
COPY requirements/torch-*.txt requirements/
RUN [ "${TORCH}" = cuda ] || export PIP_EXTRA_INDEX_URL="${TORCH_CPU_INDEX_URL}"; \
    pip install --require-hashes --only-binary :all: -r "requirements/torch-${TORCH}.txt"
COPY requirements/image.txt requirements/
RUN pip install --require-hashes --only-binary :all: -r requirements/image.txt
COPY . .
RUN pip install --no-build-isolation . && requirements/check.sh python

FROM ${BASE}
ARG TORCH=cpu
# On CUDA torch fuses the layers of a model, for which it needs a C compiler: the base's own version.
# hadolint ignore=DL3008
RUN [ "${TORCH}" = cpu ] \
 || (apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*)
COPY --from=build /opt/specwire /opt/specwire
# In /usr/local/bin too: a login shell, in which KubeRay may start Ray, has a PATH of its own.
RUN ln -s /opt/specwire/bin/specwire /opt/specwire/bin/ray /usr/local/bin/ \
 && groupadd --gid 10001 specwire \
 && useradd --uid 10001 --gid specwire --create-home specwire
# What NVIDIA's runtime mounts into the container; ignored without it.
ENV PATH=/opt/specwire/bin:$PATH \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
WORKDIR /home/specwire
ENTRYPOINT ["specwire"]
CMD ["--help"]
