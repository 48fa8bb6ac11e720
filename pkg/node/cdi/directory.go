package cdi

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
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

// HookInUse returns the path of the hook program in the common specification on
// disk, "" where there is none or it names no hook.
func (s *Specs) HookInUse() (string, error) {
	data, err := os.ReadFile(filepath.Join(s.cfg.Dir, commonFile))
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("read the common CDI specification: %w", err)
	}
	var spec specs.Spec
	if err := json.Unmarshal(data, &spec); err != nil {
		return "", nil //nolint:nilerr // it will be written again
	}
	for _, h := range spec.ContainerEdits.Hooks {
		return h.Path, nil
	}
	return "", nil
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
