package cdi

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"tags.cncf.io/container-device-interface/pkg/parser"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/tessera-dra/tessera/pkg/files"
	"github.com/tessera-dra/tessera/pkg/gpu"
)

// Claims lists the UIDs of the claims that have a specification on disk.
func (s *Specs) Claims() ([]string, error) {
	entries, err := os.ReadDir(s.cfg.Dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("list CDI specifications: %w", err)
	}
	var claims []string
	for _, e := range entries {
		uid, isClaim := strings.CutPrefix(e.Name(), claimPrefix)
		uid, isSpec := strings.CutSuffix(uid, suffix)
		if isClaim && isSpec {
			claims = append(claims, uid)
		}
	}
	return claims, nil
}

// HooksInUse returns the paths of the hook programs that the specifications on disk name.
func (s *Specs) HooksInUse() ([]string, error) {
	claims, err := s.Claims()
	if err != nil {
		return nil, err
	}
	paths := []string{filepath.Join(s.cfg.Dir, commonFile)}
	for _, uid := range claims {
		paths = append(paths, s.claimPath(uid))
	}
	var hooks []string
	for _, path := range paths {
		spec, err := readSpec(path)
		if err != nil {
			return nil, err
		}
		edits := []specs.ContainerEdits{spec.ContainerEdits}
		for _, d := range spec.Devices {
			edits = append(edits, d.ContainerEdits)
		}
		for _, e := range edits {
			for _, h := range e.Hooks {
				hooks = append(hooks, h.Path)
			}
		}
	}
	slices.Sort(hooks)
	return slices.Compact(hooks), nil
}

// MarkInUse returns the path on the host of the claim's mark in its specification on disk, ""
// where there is none or it has no mark.
func (s *Specs) MarkInUse(claimUID string) (string, error) {
	spec, err := readSpec(s.claimPath(claimUID))
	for _, m := range spec.ContainerEdits.Mounts {
		if filepath.Base(m.HostPath) == claimUID {
			return m.HostPath, err
		}
	}
	return "", err
}

// readSpec returns an empty specification where there is none, or none that can be decoded:
// it will be written again.
func readSpec(path string) (spec specs.Spec, err error) {
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return specs.Spec{}, nil
	}
	if err != nil {
		return specs.Spec{}, fmt.Errorf("read CDI specification: %w", err)
	}
	if err := json.Unmarshal(data, &spec); err != nil {
		return specs.Spec{}, nil //nolint:nilerr // it will be written again
	}
	return spec, nil
}

// Remove deletes the claim's specification. It succeeds if there is none.
func (s *Specs) Remove(claimUID string) error {
	if err := parser.ValidateDeviceName(claimUID); err != nil {
		return fmt.Errorf("remove CDI specification of claim %q: %w", claimUID, err)
	}
	return removeFile(s.claimPath(claimUID))
}

// RemoveCommon deletes the common specification, for a host that this driver
// leaves. Containers that use it can't be restarted afterwards.
func (s *Specs) RemoveCommon() error {
	return removeFile(filepath.Join(s.cfg.Dir, commonFile))
}

// Tidy removes temporary files of interrupted writes. It is for the start,
// while nothing is written.
func (s *Specs) Tidy() error {
	left, err := filepath.Glob(filepath.Join(s.cfg.Dir, gpu.CDIVendor+"-*"+tempSuffix))
	if err != nil {
		return fmt.Errorf("list temporary CDI files: %w", err)
	}
	for _, path := range left {
		err = errors.Join(err, removeFile(path))
	}
	return err
}

func removeFile(path string) error {
	if err := files.RemoveIfThere(path); err != nil {
		return fmt.Errorf("remove CDI specification: %w", err)
	}
	return nil
}
