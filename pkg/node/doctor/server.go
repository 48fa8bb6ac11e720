package doctor

import "github.com/tessera-dra/tessera/pkg/allocator"

// checkServer notes an API server whose scheduler allocates shares twice. With
// such a server the controller offers less, and prepare refuses overlapping
// devices.
func (l *look) checkServer() {
	if l.Kubernetes == "" || allocator.ChargesShared(l.Kubernetes) {
		return
	}
	l.add(Finding{Level: Note, Check: "unsafe-scheduler", What: allocator.Explain(l.Kubernetes),
		Do: "Upgrade the control plane. Until then some shares, or the whole GPU beside them, aren't offered: the status of the SharingPolicy says which."})
}
