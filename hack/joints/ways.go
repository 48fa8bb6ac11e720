package main

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"golang.org/x/exp/trace"
)

const (
	// handler is the gRPC handler, of k8s.io/dynamic-resource-allocation, that a way begins in.
	handler = ".NodePrepareResources"
	// nvmlBinding is the package whose functions call the hardware's library.
	nvmlBinding = "github.com/NVIDIA/go-nvml/pkg/nvml."
	// cdiPackage is the project's package that writes the CDI file of a claim.
	cdiPackage = "/pkg/node/cdi."
)

// way is the functions from a call into the kernel or into C outwards, innermost first, to the gRPC
// handler, which isn't part of it.
type way struct {
	call   string   // the function of the standard library or of the binding that calls
	module []string // the functions of the project, closures included
}

// ways returns the ways of all calls into the kernel and into C that a trace has, if they begin in
// the gRPC handler. Beyond the first function of a goroutine a way goes on with the functions that
// started the goroutine. Interceptors of the server come before the handler, so they don't count.
func ways(from io.Reader, module string) ([]way, error) {
	r, err := trace.NewReader(from)
	if err != nil {
		return nil, fmt.Errorf("read the trace: %w", err)
	}
	var all []way
	startedBy := map[trace.GoID][]string{}
	for {
		e, err := r.ReadEvent()
		if errors.Is(err, io.EOF) {
			return all, nil
		}
		if err != nil {
			return nil, fmt.Errorf("read the trace: %w", err)
		}
		if e.Kind() != trace.EventStateTransition || e.StateTransition().Resource.Kind != trace.ResourceGoroutine {
			continue
		}
		change := e.StateTransition()
		functions := append(functionsOf(e.Stack()), startedBy[e.Goroutine()]...)
		switch before, now := change.Goroutine(); {
		case before == trace.GoNotExist:
			startedBy[change.Resource.Goroutine()] = functions
		case now == trace.GoSyscall:
			if w, is := wayOf(functions, module); is {
				all = append(all, w)
			}
		}
	}
}

func functionsOf(s trace.Stack) (names []string) {
	for f := range s.Frames() {
		names = append(names, f.Func)
	}
	return names
}

func wayOf(functions []string, module string) (w way, is bool) {
	begins := slices.IndexFunc(functions, func(f string) bool { return strings.HasSuffix(f, handler) })
	if begins < 1 {
		return way{}, false
	}
	w.call = functions[0]
	for _, f := range functions[:begins] {
		if ours, is := strings.CutPrefix(f, module+"/"); is {
			w.module = append(w.module, ours)
		}
	}
	return w, true
}

func (w way) callsNVML() bool { return strings.HasPrefix(w.call, nvmlBinding) }

// writesCDI reports whether the way ends in a write to a file, and comes through the package that
// writes the CDI file.
func (w way) writesCDI() bool {
	return w.call == "syscall.write" &&
		slices.ContainsFunc(w.module, func(f string) bool { return strings.Contains("/"+f, cdiPackage) })
}

// first returns the project's functions on the first of the ways that is as wanted.
func first(ways []way, what string, wanted func(way) bool) ([]string, error) {
	i := slices.IndexFunc(ways, wanted)
	if i < 0 {
		return nil, fmt.Errorf("a prepare has no %s: correct the constants of hack/joints/ways.go", what)
	}
	return ways[i].module, nil
}
