package main

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strconv"
	"strings"
	"time"
)

// source is the commit that is released.
type source struct {
	root    string
	version string
	commit  string
	// time is when it was committed, the only time that a release has in it.
	time time.Time
}

// readSource reads the commit that is checked out in root. A working tree with
// changes is an error, because the build would differ from the commit.
func readSource(ctx context.Context, root, version string) (source, error) {
	changed, err := git(ctx, root, "status", "--porcelain")
	if err != nil {
		return source{}, err
	}
	if changed != "" {
		return source{}, fmt.Errorf("a release is made of a commit, and these files aren't committed:\n%s", changed)
	}
	out, err := git(ctx, root, "log", "-1", "--format=%H %ct")
	if err != nil {
		return source{}, err
	}
	commit, when, _ := strings.Cut(out, " ")
	seconds, err := strconv.ParseInt(when, 10, 64)
	if err != nil {
		return source{}, fmt.Errorf("read the time of commit %s: %w", commit, err)
	}
	tagged, err := git(ctx, root, "tag", "--list", "v"+version, "--format=%(if)%(*objectname)%(then)%(*objectname)%(else)%(objectname)%(end)")
	if err != nil {
		return source{}, err
	}
	if tagged != "" && tagged != commit {
		return source{}, fmt.Errorf("tag v%s is on commit %s, and %s is checked out: check out the tag or choose another version", version, tagged, commit)
	}
	return source{root: root, version: version, commit: commit, time: time.Unix(seconds, 0).UTC()}, nil
}

// git runs git and returns its output without the last line's end.
func git(ctx context.Context, dir string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, "git", args...)
	cmd.Dir = dir
	out, err := cmd.Output()
	if err != nil {
		if exit, ok := errors.AsType[*exec.ExitError](err); ok {
			return "", fmt.Errorf("git %s: %w: %s", strings.Join(args, " "), err, exit.Stderr)
		}
		return "", fmt.Errorf("git %s: %w", strings.Join(args, " "), err)
	}
	return strings.TrimRight(string(out), "\n"), nil
}
