package kubelet

import "time"

// LookOften has a plugin look at the sockets all the time.
func (p *Plugin) LookOften() { p.every = 10 * time.Millisecond }
