package prepare

import (
	"context"
	"fmt"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// Exclude keeps prepares from giving the GPU, or a part of it, to claims until include
// is called: they wait. It doesn't look for claims that have the GPU already. why
// explains the wait: "it is being reset".
func (p *Preparer) Exclude(ctx context.Context, uuid gpu.UUID, why string) (include func(), _ error) {
	unlock, err := p.gpuLocks.Lock(ctx, uuid)
	if err != nil {
		return nil, fmt.Errorf("wait for a prepare on GPU %s: %w", uuid, err)
	}
	p.excluded.Store(uuid, why)
	return func() {
		p.excluded.Delete(uuid)
		unlock()
	}, nil
}

// excludedOf returns why one of the GPUs is excluded, for an error; empty if none is.
func (p *Preparer) excludedOf(uuids []gpu.UUID) string {
	for _, uuid := range uuids {
		if why, ok := p.excluded.Load(uuid); ok {
			return fmt.Sprintf(" (GPU %s: %s)", uuid, why)
		}
	}
	return ""
}
