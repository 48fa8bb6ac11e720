package feed

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/tessera-dra/tessera/pkg/kubectl/view"
)

// Update is a change of the page's data.
type Update struct {
	// Cluster is nil if it is the same as before.
	Cluster *Cluster
	// Nodes replace those of the same names, and Gone are the names of those that are
	// gone.
	Nodes []view.PageNode
	Gone  []string
	// All: everything that can be read has been read; once.
	All bool
}

// Follow calls f with the page's data, and then with each change of them, until f fails
// or the context ends. The source has to run meanwhile.
func (s *Source) Follow(ctx context.Context, f func(Update) error) error {
	for version := uint64(0); ; {
		c, err := s.Since(ctx, version)
		if err != nil {
			return err
		}
		u, err := c.decode()
		if err == nil {
			err = f(u)
		}
		if err != nil {
			return err
		}
		version = c.Version
	}
}

func (c Change) decode() (Update, error) {
	out := Update{Nodes: make([]view.PageNode, len(c.Nodes)), Gone: c.Gone, All: c.All}
	if c.Cluster != nil {
		out.Cluster = new(Cluster)
		if err := json.Unmarshal(c.Cluster, out.Cluster); err != nil {
			return out, fmt.Errorf("decode the cluster: %w", err)
		}
	}
	for i, raw := range c.Nodes {
		if err := json.Unmarshal(raw, &out.Nodes[i]); err != nil {
			return out, fmt.Errorf("decode a node: %w", err)
		}
	}
	return out, nil
}
