package main

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/tessera-dra/tessera/test/cluster"
)

// Outcomes of a story.
const (
	works  = "works"
	fails  = "fails"
	absent = "not on this server"
)

// cell is the outcome of a story on the clusters of a column.
type cell struct {
	Outcome string `json:"outcome"`
	// Reason why it is absent.
	Reason string `json:"reason,omitempty"`
	// Seconds that the story took.
	Seconds float64 `json:"seconds,omitempty"`
	// Commit and Date of the run.
	Commit string `json:"commit"`
	Date   string `json:"date"`
}

// result has the outcome of each story in the runs of a column, by the story's name.
type result map[string]cell

// run runs stories of a column and adds what go test prints to a log.
func (c column) run(ctx context.Context, stories []string, lanes int, log string) (result, error) {
	commit, err := commitOf(ctx)
	if err != nil {
		return nil, err
	}
	r := result{}
	if err := os.MkdirAll(filepath.Dir(log), 0o755); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(log, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	test := exec.CommandContext(ctx, "go", "test", "-json", "-tags", "e2e", "-count", "1", "-timeout", "90m",
		"-run", "^(TestStories|TestWithoutDRA)$/^("+strings.Join(stories, "|")+")?$", "./test/e2e",
		"-lanes", fmt.Sprint(lanes), "-clusters", c.cluster(), "-kubernetes", c.kubernetes, "-kubelet", c.kubelet, "-dra", string(c.dra),
		"-containerd", cmp.Or(c.containerd, cluster.DefaultContainerd))
	test.Stderr = f
	// go test doesn't pass on a signal: the whole group gets it.
	test.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	test.Cancel = func() error { return syscall.Kill(-test.Process.Pid, syscall.SIGKILL) }
	out, err := test.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := test.Start(); err != nil {
		return nil, fmt.Errorf("run go test: %w", err)
	}
	if err := c.collect(io.TeeReader(out, f), r); err != nil && ctx.Err() == nil {
		return nil, err
	}
	err = test.Wait()
	if ctx.Err() != nil {
		return nil, errors.Join(context.Cause(ctx), c.takeDown(lanes))
	}
	if len(r) == 0 {
		return nil, errors.New("no story ran; see " + log)
	}
	// go test says nothing of stories that a crash or its time limit cut short.
	for _, story := range stories {
		if _, ended := r[story]; !ended {
			r[story] = cell{Outcome: fails}
		}
	}
	for story, found := range r {
		found.Commit, found.Date = commit, time.Now().UTC().Format(time.DateOnly)
		r[story] = found
	}
	if err != nil && r.count(fails) == 0 {
		return nil, fmt.Errorf("go test: %w; see %s", err, log)
	}
	return r, nil
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

// commitOf names the checkout's commit; "-dirty" if files differ from it that aren't
// documents, which the program itself writes.
func commitOf(ctx context.Context) (string, error) {
	const script = `echo "$(git rev-parse --short HEAD)$(git diff --quiet HEAD -- . ':!*.md' ':!docs' || echo -dirty)"`
	out, err := exec.CommandContext(ctx, "bash", "-c", script).Output()
	if err != nil {
		return "", fmt.Errorf("name the commit: %w", err)
	}
	return strings.TrimSpace(string(out)), nil
}

// testEvent is a line of go test -json (go doc test2json).
type testEvent struct {
	Action, Test, Output string
	Elapsed              float64
}

// collect reads the outcomes of stories, and says each.
func (c column) collect(events io.Reader, r result) error {
	reasons := map[string]string{}
	lines := bufio.NewScanner(events)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var e testEvent
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			continue // of a program that go test runs
		}
		_, story, found := strings.Cut(e.Test, "/")
		if e.Test == withoutDRA {
			story, found = withoutDRA, true
		}
		if !found {
			continue
		}
		switch e.Action {
		case "output":
			if _, reason, found := strings.Cut(e.Output, "not on this server: "); found {
				reasons[story] = strings.TrimSpace(reason)
			}
			continue
		case "pass":
			r[story] = cell{Outcome: works, Seconds: e.Elapsed}
		case "skip":
			r[story] = cell{Outcome: absent, Reason: reasons[story]}
		case "fail":
			r[story] = cell{Outcome: fails, Seconds: e.Elapsed}
		default:
			continue
		}
		fmt.Printf("matrix: %s: %s: %s\n", c.id(), story, r[story].Outcome)
	}
	return lines.Err()
}

// withoutDRA is the test of a server without Dynamic Resource Allocation.
const withoutDRA = "TestWithoutDRA"
