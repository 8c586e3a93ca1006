# syntax=docker/dockerfile:1
# roadtrain in a container. Server processes share memory with the trainer and pin it, so give both:
#   docker build -t roadtrain .
#   docker run --rm -it --gpus all --shm-size 16g --ulimit memlock=-1 -v /mnt/ssd0:/data roadtrain train /data/job.toml
# Without a GPU, a smaller torch: --build-arg PIP_EXTRA_INDEX_URL=... with the index of PyTorch's CPU builds.
FROM python:3.11-slim-bookworm AS roadtrain
ARG TORCH=torch==2.13.0
ARG EXTRAS=hf,integrations
ARG PIP_EXTRA_INDEX_URL
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
# The argument names the version.
# hadolint ignore=DL3013
RUN python -m pip install "${TORCH}"
COPY pyproject.toml README.md LICENSE /src/
COPY src /src/src
RUN python -m pip install "/src[${EXTRAS}]"
# Compiled kernels are kept beside the package: compile them now, so that no container has to.
RUN useradd --create-home --uid 1000 trainer && roadtrain check-rule torch.optim:AdamW && chown -R trainer /usr/local/lib/python3.11/site-packages/roadtrain
USER 1000
WORKDIR /data
ENTRYPOINT ["roadtrain"]
CMD ["--help"]

# For developers (.devcontainer/): the programs that tests use. The repository is mounted, and `make` installs it.
FROM python:3.11-slim-bookworm AS development
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
COPY .ci/packages /tmp/packages
# hadolint ignore=DL3008
RUN apt-get update \
	&& xargs -a /tmp/packages apt-get install -y --no-install-recommends git make sudo \
	&& rm -rf /var/lib/apt/lists/*
