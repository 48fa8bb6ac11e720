package page

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"time"

	"github.com/tessera-dra/tessera/pkg/kubectl/feed"
)

// stalled is how long a browser may take to read a part of the events.
const stalled = time.Minute

// batch is how many nodes an event has at most: the page draws between events.
const batch = 64

// events streams the page's data, and then each change of them. The events:
//
//	cluster  a Cluster
//	nodes    an array of view.PageNode, which replace those of the same names
//	gone     an array of names of nodes
//	all      nodes that this stream hasn't named are gone; once, when all have been read
func (s *Server) events(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "text/event-stream")
	out := stream{w, http.NewResponseController(w)}
	for version := uint64(0); ; {
		c, err := s.source.Since(r.Context(), version)
		if err != nil {
			return
		}
		if out.change(c) != nil {
			return // the browser is gone, or stalled; it asks again
		}
		version = c.Version
	}
}

// stream writes events.
type stream struct {
	http.ResponseWriter
	control *http.ResponseController
}

func (s stream) change(c feed.Change) error {
	var err error
	if c.Cluster != nil {
		err = s.send("cluster", c.Cluster)
	}
	for part := range slices.Chunk(c.Nodes, batch) {
		err = errors.Join(err, s.send("nodes", array(part)))
	}
	if len(c.Gone) > 0 {
		err = errors.Join(err, s.send("gone", feed.Encode(c.Gone)))
	}
	if c.All {
		err = errors.Join(err, s.send("all", []byte("{}")))
	}
	return errors.Join(err, s.control.Flush())
}

func (s stream) send(event string, data []byte) error {
	if err := s.control.SetWriteDeadline(time.Now().Add(stalled)); err != nil && !errors.Is(err, http.ErrNotSupported) {
		return err
	}
	_, err := fmt.Fprintf(s, "event: %s\ndata: %s\n\n", event, data)
	return err
}

// array is a JSON array of these.
func array(of []json.RawMessage) []byte {
	parts := make([][]byte, len(of))
	for i, raw := range of {
		parts[i] = raw
	}
	return slices.Concat([]byte("["), bytes.Join(parts, []byte(",")), []byte("]"))
}
