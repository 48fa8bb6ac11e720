// Package protocol is how the play of test/allocators talks to the allocator of
// a Kubernetes release, which is a program of its own: one JSON value a line,
// requests on stdin, replies on stdout. The objects are those of the release's
// version of resource.k8s.io.
package protocol

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
)

// Request asks for the allocation of one claim on one node.
type Request[Class, Slice, Result, Claim any] struct {
	// Node to allocate on.
	Node string `json:"node"`
	// Classes of the cluster; if nil, those of the request before.
	Classes []*Class `json:"classes,omitempty"`
	// Slices in the order in which an informer returns them; if nil, those of the
	// request before.
	Slices []*Slice `json:"slices,omitempty"`
	// Allocated are the results of all claims that are allocated.
	Allocated []Result `json:"allocated,omitempty"`
	Claim     *Claim   `json:"claim"`
}

// Reply has at most one of an allocation and an error; neither if the claim has
// to wait.
type Reply[Allocation any] struct {
	Allocation *Allocation `json:"allocation,omitempty"`
	Error      string      `json:"error,omitempty"`
}

// Main answers requests until stdin ends. The first argument of the program is
// the JSON object of the release's Features with those that are on; one that the
// release doesn't have is ignored. With a second argument, fields of objects that the
// release doesn't have are dropped, as it drops those of a newer API server; otherwise
// they are an error.
func Main[Features, Class, Slice, Result, Claim, Allocation any](
	allocate func(Features, Request[Class, Slice, Result, Claim]) (*Allocation, error),
) {
	if err := serve(os.Stdin, os.Stdout, os.Args[1], len(os.Args) > 2, allocate); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func serve[Features, Class, Slice, Result, Claim, Allocation any](
	in io.Reader, out io.Writer, arg string, drop bool, allocate func(Features, Request[Class, Slice, Result, Claim]) (*Allocation, error),
) error {
	var features Features
	if err := json.Unmarshal([]byte(arg), &features); err != nil {
		return fmt.Errorf("features %s: %w", arg, err)
	}
	var last Request[Class, Slice, Result, Claim]
	requests, replies := json.NewDecoder(in), json.NewEncoder(out)
	if !drop {
		requests.DisallowUnknownFields()
	}
	for {
		var r Request[Class, Slice, Result, Claim]
		switch err := requests.Decode(&r); {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		}
		if r.Classes == nil {
			r.Classes = last.Classes
		}
		if r.Slices == nil {
			r.Slices = last.Slices
		}
		last = r
		var reply Reply[Allocation]
		allocation, err := allocate(features, r)
		if err != nil {
			reply.Error = err.Error()
		} else {
			reply.Allocation = allocation
		}
		if err := replies.Encode(reply); err != nil {
			return err
		}
	}
}

// Classes lists a request's classes, as the allocators ask for them.
type Classes[Class any] struct {
	Names func(*Class) string
	All   []*Class
}

// List returns all classes.
func (c Classes[Class]) List() ([]*Class, error) { return c.All, nil }

// Get returns the class of a name.
func (c Classes[Class]) Get(name string) (*Class, error) {
	for _, class := range c.All {
		if c.Names(class) == name {
			return class, nil
		}
	}
	return nil, fmt.Errorf("there is no class %s", name)
}
