package node

import "io"

type (
	hardware interface { // want: interface
		Read() error
	}
	closer interface{ io.Closer } // want: interface
	reader io.Reader              // want: interface
	alias  = interface{ Close() } // want: interface
)

type withFields struct {
	session interface { // want: interface
		Reset() error
	}
	hardware
}

func asserts(v any) {
	_, _ = v.(interface{ Unwrap() error }) // want: interface
}

// These have no methods, or are another name of one that has a name.
type (
	anything interface{}
	nothing  = any
	another  = io.Writer
)

// These are constraints: values don't have them as their type.
type (
	number interface{ ~int | ~float64 }
	keyed  interface {
		comparable
		Key() string
	}
	used interface{ Use() }
)

type store[R used] struct{ records []R }

func keep[R used, L interface{ Len() int }](s *store[R], by L) int { return by.Len() + len(s.records) }

// These are constraints, and types of values, too.
type (
	both  interface{ Both() }  // want: interface
	mixed interface{ Mixed() } // want: interface
)

func generic[B both](b B) { values(b, nil) }

func values(both, mixed) {}

func mixes[M mixed](m M) { values(nil, m) }
