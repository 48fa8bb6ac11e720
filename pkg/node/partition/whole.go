package partition

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

// ClearMIG makes sure that the GPU can be used whole: idle partitions of ours are
// destroyed and the mode is switched off if we switched it on. An error where
// it is in MIG mode because of others: a gpu.RefusedError, as of Ensure.
func (m *Manager) ClearMIG(ctx context.Context, uuid gpu.UUID) (err error) {
	defer wrap(&err, "use GPU %s whole", uuid)
	v, err := m.visit(ctx, "whole", uuid)
	if err != nil {
		return err
	}
	defer v.end(&err)
	defer v.schedule()
	v.want = gpu.Whole{GPU: uuid}
	err = v.look()
	if err == nil {
		err = v.readSwitched()
	}
	switch {
	case errors.Is(err, nvml.ErrNotSupported):
		return nil // a GPU without MIG is always whole
	case err != nil:
		return err
	case !v.mig.Enabled:
		return v.save()
	}
	if v.unreadable != "" {
		return errors.New(v.unreadable)
	}
	if err := v.mayBeWhole(); err != nil {
		return err
	}
	for _, o := range slices.Clone(v.ours) {
		if err := v.destroy(ctx, o); err != nil {
			return errors.Join(fmt.Errorf("make room: %w", err), v.save())
		}
	}
	return errors.Join(v.switchMode(ctx, false), v.save())
}

// mayBeWhole is an error where others, or claims, keep the GPU in MIG mode.
func (v *visit) mayBeWhole() error {
	for _, o := range v.ours {
		if holder := v.m.describeClaimOn(o.Partition); holder != "" && o.complete() {
			return fmt.Errorf("%w: %s holds %s: delete that claim's pods, or delete this pod so that its claim is allocated again", ErrHeld, holder, instanceName(*o.instance))
		}
	}
	if len(v.others) > 0 {
		return v.refused(fmt.Errorf("it is divided by others than Tessera: there are %s; have whoever made them destroy them (nvidia-smi mig -i %s -dci; nvidia-smi mig -i %s -dgi)", v.describe(), v.uuid, v.uuid))
	}
	if !v.switched {
		return v.refused(fmt.Errorf("MIG mode is on, and Tessera didn't switch it on: switch it off (nvidia-smi -i %s -mig 0)", v.uuid))
	}
	return nil
}
