package kubelet

import "time"

// LookOften makes a plugin check the sockets every 10 milliseconds.
func (p *Plugin) LookOften() { p.every = 10 * time.Millisecond }
