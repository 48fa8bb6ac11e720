package feed

import (
	"bytes"
	"context"
	"encoding/json"
	"maps"
	"slices"

	"github.com/tessera-dra/tessera/pkg/notify"
)

// board has the page's data: the JSON of each node and of its outline, and one object
// for the cluster.
// Readers ask for the differences since they last did.
type board struct {
	mu      notify.Mutex
	version uint64
	// read is the version that had all nodes first; 0 before.
	read    uint64
	cluster post
	// nodes that are gone have no JSON.
	nodes map[string]nodePost
}

// post is JSON, and the version of the board since which it is there.
type post struct {
	version uint64
	json    json.RawMessage
}

// nodePost is the JSON of a node, which its outline follows from.
type nodePost struct {
	post
	outline json.RawMessage
}

// nodeJSON is the JSON of a node and of its outline; both nil for a node that is gone.
type nodeJSON struct{ whole, outline json.RawMessage }

// Change is the difference from an earlier version of the board.
type Change struct {
	Version uint64
	// all: the first change with all nodes.
	All     bool
	Cluster json.RawMessage // nil: the same
	Nodes   []json.RawMessage
	Gone    []string
}

func newBoard() *board { return &board{nodes: make(map[string]nodePost)} }

// put replaces the cluster's JSON and that of some nodes, nil for nodes that are gone.
// JSON that is the same stays as old as it was. From the first time with read on, the board
// has all nodes.
func (b *board) put(cluster json.RawMessage, nodes map[string]nodeJSON, read bool) {
	b.mu.Lock()
	same, first := bytes.Equal(cluster, b.cluster.json), read && b.read == 0
	for name, n := range nodes {
		if old, ok := b.nodes[name]; bytes.Equal(old.json, n.whole) && (ok || n.whole == nil) {
			delete(nodes, name)
		}
	}
	b.mu.Unlock()
	if same && !first && len(nodes) == 0 {
		return
	}
	b.mu.Change(func() {
		b.version++
		if first {
			b.read = b.version
		}
		if !same {
			b.cluster = post{b.version, cluster}
		}
		for name, n := range nodes {
			b.nodes[name] = nodePost{post{b.version, n.whole}, n.outline}
		}
	})
}

// outline has the data that the map of the whole cluster is drawn from.
type outline struct {
	Cluster json.RawMessage   `json:"cluster"`
	Nodes   []json.RawMessage `json:"nodes"`
}

// Outlines returns the JSON of those of all nodes; of none while they haven't all been read.
func (s *Source) Outlines() json.RawMessage {
	b := s.board
	b.mu.Lock()
	defer b.mu.Unlock()
	out := outline{Cluster: b.cluster.json, Nodes: []json.RawMessage{}}
	if b.read == 0 {
		return Encode(out)
	}
	for _, name := range slices.Sorted(maps.Keys(b.nodes)) {
		if n := b.nodes[name]; n.outline != nil {
			out.Nodes = append(out.Nodes, n.outline)
		}
	}
	return Encode(out)
}

// Since waits until something differs from the version, 0 for none, and returns that.
func (s *Source) Since(ctx context.Context, version uint64) (Change, error) {
	b := s.board
	var out Change
	err := b.mu.Wait(ctx, func() bool {
		if b.version == version {
			return false
		}
		out = Change{Version: b.version, All: b.read > version}
		if b.cluster.version > version {
			out.Cluster = b.cluster.json
		}
		var names []string
		for name, p := range b.nodes {
			if p.version > version {
				names = append(names, name)
			}
		}
		slices.Sort(names)
		for _, name := range names {
			if raw := b.nodes[name].json; raw != nil {
				out.Nodes = append(out.Nodes, raw)
			} else if version > 0 {
				out.Gone = append(out.Gone, name)
			}
		}
		return true
	})
	return out, err
}
