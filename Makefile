# make serve   set up what is missing, then run the server: open the address that it prints
# make test    set up what is missing, then lint and test
# make audit   known faults and licences of all that is installed (asks a package index)
# ARGS="..."   is passed on: make serve ARGS="--set server.port=9000", make test ARGS="-k pool"

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: serve test lint audit browser clean

VENV := .venv
PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/.installed
WHISPER := $(VENV)/.whisper
AUDIT := .venv-audit
TORCH := torch==2.13.0
PIP := $(PYTHON) -m pip install --quiet --disable-pip-version-check
SUDO := $(shell [ "$$(id -u)" = 0 ] || command -v sudo)
APT := $(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get -qq
ARGS ?=

serve: $(STAMP) $(WHISPER)
	@exec $(VENV)/bin/characters serve $(ARGS)

test: $(STAMP) lint browser
	@$(PYTHON) -m pytest -q $(ARGS)

lint: $(STAMP)
	@$(VENV)/bin/ruff check --quiet .
	@$(VENV)/bin/ruff format --check --quiet .
	@$(VENV)/bin/mypy --no-error-summary

# Apart, so that the tools audit the server's packages and not themselves.
audit: $(STAMP)
	@$(PYTHON) -m venv $(AUDIT)
	@$(AUDIT)/bin/pip install --quiet --disable-pip-version-check 'pip-audit>=2.9,<3' 'pip-licenses>=5,<6'
	@$(AUDIT)/bin/python scripts/audit.py $(PYTHON)

# The first Python from 3.11 on that can make virtual environments; Debian and Ubuntu keep that
# ability in a package of its own.
FIND_PYTHON = for p in python3.11 python3.12 python3.13 python3; do \
	  "$$p" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	    && command -v "$$p" && break; \
	done

$(PYTHON):
	@found="$$($(FIND_PYTHON) || true)"; \
	if [ -z "$$found" ]; then \
	  echo "Installing python3-venv ..."; \
	  $(APT) update >/dev/null; \
	  $(APT) install -y --no-install-recommends python3 python3-venv >/dev/null; \
	  found="$$($(FIND_PYTHON) || true)"; \
	fi; \
	if [ -z "$$found" ]; then echo "Python 3.11 or newer with venv is needed" >&2; exit 1; fi; \
	echo "Making $(VENV) with $$found ..."; \
	"$$found" -m venv $(VENV)

# torch first and alone: what follows then fits itself to that build.
$(STAMP): pyproject.toml | $(PYTHON)
	@echo "Installing packages (minutes the first time) ..."
	@$(PIP) '$(TORCH)'
	@$(PIP) -e '.[dev]'
	@touch $@

# The better recogniser with its model, and the model in the wheel of pipecat-ai, of which nothing
# else is used: tried once, and the server runs without them too.
$(WHISPER): pyproject.toml | $(STAMP)
	@echo "Installing whisper, to understand what is said ..."
	@$(PIP) --retries 1 --timeout 10 -e '.[whisper]' >/dev/null 2>&1 \
	  || echo "whisper could not be installed: pocketsphinx listens, which misunderstands more"
	@$(PIP) --retries 1 --timeout 10 --no-deps pipecat-ai==1.14.0 >/dev/null 2>&1 \
	  || echo "Smart Turn could not be installed: the words alone tell when you have finished"
	@touch $@

browser: $(STAMP)
	@if ! command -v chromium >/dev/null; then \
	  echo "Installing a browser for the tests ..."; \
	  { $(APT) update && $(APT) install -y --no-install-recommends chromium fonts-dejavu-core; } \
	    >/dev/null 2>&1 || true; \
	fi; \
	if ! chromium --version >/dev/null 2>&1; then \
	  echo "No working chromium package here; taking Playwright's ..."; \
	  $(PYTHON) -m playwright install --with-deps chromium >/dev/null; \
	fi

clean:
	rm -rf $(VENV) $(AUDIT) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
