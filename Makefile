# Every target does all set-up itself: Python 3.10 or newer with pip is enough, no compiler.
# PYTHON=python3.12 picks the interpreter for a new .venv; PIP_* variables reach pip.

VENV ?= .venv
export VENV PYTHON

.PHONY: demo tiny test check smoke docs bench parity clean

demo:  ## train the same network plain and squeezed, side by side
	@scripts/install
	@$(VENV)/bin/squeezebox demo

tiny:  ## a glance at each part, at every save
	@scripts/install test
	@scripts/test tests/tiny --quiet

test:  ## the checks, the package built and tried, and the tests; .ci/run adds the slow ones
	@scripts/install test
	@$(MAKE) --no-print-directory --jobs 2 check smoke
	@scripts/test --numprocesses 2 --dist worksteal --durations 10

check:  ## style, types, walls and the documentation
	@scripts/install test
	@scripts/check

smoke:  ## the package built, installed and tried, with what .venv has
	@scripts/install test
	@scripts/smoke --reuse

docs:  ## the site, in site/; its first page is site/index.html
	@scripts/install docs
	@scripts/docs

bench:  ## every claim's report of this code that is missing, or some: make bench BENCHMARKS="codecs step_time"
	@scripts/install bench
	@$(VENV)/bin/python -m benchmarks._again $(BENCHMARKS)

parity:  ## exact, compiled and autocast training against plain PyTorch's, layer by layer
	@scripts/install test
	@$(VENV)/bin/python -m benchmarks.parity_own --no-report

clean:  ## what the other targets made, .venv included
	rm -rf $(VENV) build site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
