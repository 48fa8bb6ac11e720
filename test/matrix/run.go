package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/tessera-dra/tessera/sim/cluster"
	"github.com/tessera-dra/tessera/test/outcome"
)

// withoutDRA is the test of a server without Dynamic Resource Allocation.
const withoutDRA = "TestWithoutDRA"

// run runs stories of a column and adds what go test prints to a log.
func (c column) run(ctx context.Context, stories []string, lanes int, log string) (outcome.Result, error) {
	return outcome.Run{
		Title: "matrix: " + c.id(), Stories: stories, Tests: []string{withoutDRA}, Log: log,
		Args: []string{
			"-timeout", "90m", "-run", "^(TestStories|" + withoutDRA + ")$/^(" + strings.Join(stories, "|") + ")?$", "./test/e2e",
			"-lanes", fmt.Sprint(lanes), "-clusters", c.cluster(), "-kubernetes", c.kubernetes, "-kubelet", c.kubelet, "-dra", string(c.dra),
			"-runtime", cmp.Or(c.runtime, cluster.DefaultRuntime),
		},
		TakeDown: func() error { return c.takeDown(lanes) },
	}.Do(ctx)
}

// takeDown removes the clusters of a run that was interrupted.
func (c column) takeDown(lanes int) error {
	names := []string{c.cluster() + "-without"}
	for i := range lanes {
		names = append(names, fmt.Sprintf("%s-%d", c.cluster(), i))
	}
	var errs []error
	for _, name := range names {
		errs = append(errs, cluster.Down(context.Background(), name, os.Stderr))
	}
	return errors.Join(errs...)
}
