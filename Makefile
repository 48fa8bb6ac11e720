# Everything a person or CI does here is one target; `make` alone lists them.
# Products go to bin/, everything else that is made goes to _output/.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules --no-print-directory

GO ?= go
# Kubernetes version of the local cluster, and its name when several run.
KUBERNETES ?= 1.37
CLUSTER ?= tessera
# How long each fuzz target runs.
FUZZTIME ?= 10s

VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
LDFLAGS := -s -w -X main.version=$(VERSION)

TOOLS := _output/tools
TOOLS_STAMP := $(TOOLS)/.stamp
# Packages that need no cluster. The rest of the ladder has targets of its own.
UNIT = $(shell $(GO) list ./... | grep -vE '/test/(e2e|crash|scale)(/|$$)')

.PHONY: help
help: ## List the targets
	@awk 'BEGIN {FS = ":.*## "} \
		/^##@ / {printf "\n%s\n", substr($$0, 5)} \
		/^[a-z-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

##@ Build

.PHONY: build
build: prepare ## Build the programs into bin/ and the simulator library beside them
	mkdir -p bin
	$(GO) build -trimpath -ldflags '$(LDFLAGS)' -o bin/ $(filter-out ./cmd/nvmlsim,$(sort $(wildcard ./cmd/*)))
	$(GO) build -trimpath -buildmode=c-shared -o bin/libnvidia-ml.so.1 ./cmd/nvmlsim

.PHONY: generate
generate: $(TOOLS_STAMP) ## Make every generated file again
	hack/generate.sh

.PHONY: prepare
prepare: # Install the distribution packages that are missing
	@hack/prepare.sh

$(TOOLS_STAMP): tools/go.mod tools/go.sum
	@echo "building the tools of tools/go.mod (a minute or two the first time)"
	mkdir -p $(TOOLS)
	$(GO) build -C tools -o ../$(TOOLS)/ tool
	touch $@

# Helm, of the very version and flags that the local cluster is built with.
$(TOOLS)/helm: test/cluster/helm/go.mod test/cluster/helm/go.sum
	@echo "building helm (three minutes the first time)"
	mkdir -p $(TOOLS)
	CGO_ENABLED=0 $(GO) build -C test/cluster/helm -trimpath '-ldflags=-s -w' -o $(CURDIR)/$@ helm.sh/helm/v4/cmd/helm

.PHONY: tools
tools: $(TOOLS_STAMP) $(TOOLS)/helm # Build the pinned tools

##@ Check

.PHONY: verify
verify: prepare tools ## Check all that a machine can check: generated files, style, modules, chart
	hack/verify.sh

.PHONY: chart
chart: $(TOOLS)/helm ## Check the Helm chart and pack it into _output/chart/
	hack/verify.sh chart
	mkdir -p _output/chart
	$(TOOLS)/helm package deployments/helm/tessera --destination _output/chart

.PHONY: lint
lint: prepare $(TOOLS_STAMP) ## Run the linters only
	hack/verify.sh format lint logcheck

.PHONY: format
format: $(TOOLS_STAMP) ## Format the Go files
	$(TOOLS)/golangci-lint fmt

.PHONY: test
test: test-unit test-e2e ## Run every test that needs no GPU, the end-to-end ones on a real local cluster

.PHONY: test-unit
test-unit: prepare ## Run the tests that need no cluster, under the race detector
	$(GO) test -race -count 1 $(UNIT)

.PHONY: fuzz
fuzz: prepare ## Fuzz everything that parses, $(FUZZTIME) a target
	GO='$(GO)' hack/fuzz.sh $(FUZZTIME)

##@ House

.PHONY: clean
clean: ## Remove what was built here (bin/ and _output/)
	rm -rf bin _output
