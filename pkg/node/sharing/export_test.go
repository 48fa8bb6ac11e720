package sharing

import "time"

// SetClosedFor shortens how long GPUs stay closed after a daemon is back.
func (m *Manager) SetClosedFor(d time.Duration) { m.closedFor = d }
