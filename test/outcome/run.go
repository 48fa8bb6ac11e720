package outcome

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

// Run is a run of stories.
type Run struct {
	// Title is the prefix of progress lines.
	Title string
	// Stories that run.
	Stories []string
	// Tests are others that count as stories, by their names.
	Tests []string
	// Args of go test, besides those that every run has.
	Args []string
	// Log is the file to which all that go test prints is added.
	Log string
	// TakeDown removes the clusters of a run that was interrupted.
	TakeDown func() error
}

// Do runs the stories and returns the outcome of each. A story that fails is no error.
func (run Run) Do(ctx context.Context) (Result, error) {
	commit, err := commitOf(ctx)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(filepath.Dir(run.Log), 0o755); err != nil {
		return nil, err
	}
	log, err := os.OpenFile(run.Log, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	r, err := run.test(ctx, log)
	if err != nil {
		return nil, err
	}
	// go test says nothing of stories that a crash or its time limit cut short.
	for _, story := range run.Stories {
		if _, ended := r[story]; !ended {
			r[story] = Entry{Outcome: Fails}
		}
	}
	for story, found := range r {
		found.Commit, found.Date = commit, time.Now().UTC().Format(time.DateOnly)
		r[story] = found
	}
	return r, nil
}

func (run Run) test(ctx context.Context, log io.Writer) (Result, error) {
	test := exec.CommandContext(ctx, "go", append([]string{"test", "-json", "-tags", "e2e", "-count", "1"}, run.Args...)...)
	test.Stderr = log
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
	r := Result{}
	if err := run.collect(io.TeeReader(out, log), r); err != nil && ctx.Err() == nil {
		return nil, err
	}
	err = test.Wait()
	switch {
	case ctx.Err() != nil:
		return nil, errors.Join(context.Cause(ctx), run.TakeDown())
	case len(r) == 0:
		return nil, errors.New("no story ran; see " + run.Log)
	case err != nil && r.Count(Fails) == 0:
		return nil, fmt.Errorf("go test: %w; see %s", err, run.Log)
	}
	return r, nil
}

// testEvent is a line of go test -json (go doc test2json).
type testEvent struct {
	Action, Test, Output string
	Elapsed              float64
}

// collect reads the outcomes of stories, and prints each.
func (run Run) collect(events io.Reader, r Result) error {
	reasons := map[string]string{}
	lines := bufio.NewScanner(events)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var e testEvent
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			continue // of a program that go test runs
		}
		story := run.story(e.Test)
		if story == "" {
			continue
		}
		switch e.Action {
		case "output":
			if _, reason, found := strings.Cut(e.Output, Absent+": "); found {
				reasons[story] = strings.TrimSpace(reason)
			}
			continue
		case "pass":
			r[story] = Entry{Outcome: Works, Seconds: e.Elapsed}
		case "skip":
			r[story] = Entry{Outcome: Absent, Reason: reasons[story]}
		case "fail":
			r[story] = Entry{Outcome: Fails, Seconds: e.Elapsed}
		default:
			continue
		}
		fmt.Printf("%s: %s: %s\n", run.Title, story, r[story].Outcome)
	}
	return lines.Err()
}

// story names the story of a test, which is a subtest, or one of the other tests.
func (run Run) story(test string) string {
	if slices.Contains(run.Tests, test) {
		return test
	}
	_, story, _ := strings.Cut(test, "/")
	return story
}
