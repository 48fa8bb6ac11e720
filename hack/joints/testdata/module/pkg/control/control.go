// Package control ships, but isn't the plugin's.
package control

import "sync"

// Server is what Run needs.
type Server interface{ Serve() } // want: interface outside node

type state struct {
	mu   sync.Mutex
	step func(string)
}

// Run starts a goroutine.
func Run(s Server) {
	var of state
	of.mu.Lock()
	go of.step("")
	s.Serve()
}
