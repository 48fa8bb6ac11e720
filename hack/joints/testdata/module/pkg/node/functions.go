package node

import (
	"context"
	"net/http"
	"sync/atomic"
)

type health func() error

type config struct {
	Step    func(string)            // want: function field
	healthy health                  // want: function field
	a, b    func()                  // want: function field, function field
	all     []func()                // want: function field
	byName  map[string]health       // want: function field
	queue   chan func()             // want: function field
	last    *func()                 // want: function field
	changed atomic.Pointer[func()]  // want: function field
	health                          // want: function field
	inner   struct{ inside func() } // want: function field

	// A type of another project's is named for what it does there.
	cancel  context.CancelFunc
	handler http.HandlerFunc
	other   *config
}

// Methods, parameters and variables aren't fields.
func (c *config) method(f func()) { f() }

func table() {
	for _, row := range []struct {
		name string
		do   func() // want: function field
	}{{"", nil}} {
		row.do()
	}
	f := func() {}
	f()
}
