package allocators

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
)

// Program is the allocator of a release, running as a program.
type Program struct {
	api      api
	command  *exec.Cmd
	requests io.WriteCloser
	replies  *json.Decoder
	// said is the end of its log.
	said tail
	// slices that it has.
	slices []*resourceapi.ResourceSlice
}

// Build builds the program of a release's module, and returns its path.
func Build(folder, module string) (string, error) {
	out := filepath.Join(folder, module)
	build := exec.Command("go", "build", "-C", module, "-trimpath", "-buildvcs=false", "-o", out, ".")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if said, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build the allocator of Kubernetes %s: %w: %s", module, err, said)
	}
	return out, nil
}

// start runs a program that Build built, with its arguments. Objects are sent in the
// version of resource.k8s.io that its release has.
func start(ctx context.Context, path string, api api, args ...string) (*Program, error) {
	p := &Program{api: api, command: exec.CommandContext(ctx, path, args...)}
	p.command.Stderr = &p.said
	var err error
	if p.requests, err = p.command.StdinPipe(); err != nil {
		return nil, err
	}
	replies, err := p.command.StdoutPipe()
	if err != nil {
		return nil, err
	}
	p.replies = json.NewDecoder(replies)
	if err := p.command.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", path, err)
	}
	return p, nil
}

// Close ends the program.
func (p *Program) Close() error {
	return errors.Join(p.requests.Close(), p.command.Wait())
}

// Allocate implements Allocator.
func (p *Program) Allocate(_ context.Context, q Question) (*resourceapi.AllocationResult, error) {
	r, err := p.request(q)
	if err != nil {
		return nil, err
	}
	if _, err := p.requests.Write(r); err != nil {
		return nil, fmt.Errorf("write to %s: %w", p.command.Path, err)
	}
	var reply struct {
		Allocation json.RawMessage
		Error      string
	}
	switch err := p.replies.Decode(&reply); {
	case err != nil:
		return nil, fmt.Errorf("read the reply of %s: %w\n%s", p.command.Path, errors.Join(err, p.command.Wait()), p.said)
	case reply.Error != "":
		return nil, errors.New(reply.Error)
	case reply.Allocation == nil:
		return nil, nil //nolint:nilnil // as the interface says
	}
	return p.api.allocation(reply.Allocation)
}

// request encodes a question. Slices and classes that the program has aren't sent
// again.
func (p *Program) request(q Question) ([]byte, error) {
	r := map[string]any{"node": q.Node}
	if p.slices == nil {
		var all []any
		for _, c := range classes() {
			all = append(all, p.api.class(c))
		}
		r["classes"] = all
	}
	if !slices.Equal(q.Slices, p.slices) {
		var all []any
		for _, s := range q.Slices {
			all = append(all, p.api.slice(s))
		}
		r["slices"], p.slices = all, q.Slices
	}
	r["allocated"], r["claim"] = p.api.results(q.Allocated), p.api.claim(q.Claim)
	data, err := json.Marshal(r)
	if err != nil {
		return nil, fmt.Errorf("encode the question: %w", err)
	}
	return append(data, '\n'), nil
}

// tail keeps the last bytes that are written to it.
type tail []byte

func (t *tail) Write(p []byte) (int, error) {
	*t = append(*t, p...)
	*t = (*t)[max(0, len(*t)-4000):]
	return len(p), nil
}
