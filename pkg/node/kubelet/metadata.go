package kubelet

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/dynamic-resource-allocation/api/metadata/v1beta1"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/tessera-dra/tessera/pkg/files"
	"github.com/tessera-dra/tessera/pkg/node/holding"
)

// MetadataDirectory returns the directory in which kubeletplugin has the files about
// devices that containers can read, a directory for each claim.
func MetadataDirectory(kubeletRoot, driver string) string {
	return filepath.Join(DataDirectory(kubeletRoot, driver), "dra-device-metadata")
}

// metadataOptions has kubeletplugin write a file about a claim's devices for its containers
// (KEP-5304) and its CDI specification at each prepare, and remove both when the claim has
// been unprepared. It needs nothing of the API server or the kubelet.
func (p *Plugin) metadataOptions() []kubeletplugin.Option {
	return []kubeletplugin.Option{
		kubeletplugin.EnableDeviceMetadata(p.cfg.DeviceMetadata, []schema.GroupVersion{v1beta1.SchemeGroupVersion}),
		kubeletplugin.CDIDirectory(p.cfg.CDIDir),
		kubeletplugin.MetadataFileOps(kubeletplugin.MetadataFileOperations{WriteFile: p.writeMetadata}),
	}
}

// writeMetadata writes a file of kubeletplugin, and keeps a copy of a CDI specification beside
// the file that it mounts, for restoreSpecs: kubeletplugin writes one only at a prepare. It
// removes the copy with the file.
func (p *Plugin) writeMetadata(path string, data []byte, mode os.FileMode) error {
	if filepath.Dir(path) == filepath.Clean(p.cfg.CDIDir) {
		mounted, err := mountedBy(data)
		if err != nil {
			return err
		}
		if err := writeChanged(filepath.Join(filepath.Dir(mounted), filepath.Base(path)), data, mode); err != nil {
			return fmt.Errorf("keep a copy of a CDI specification: %w", err)
		}
	}
	return writeChanged(path, data, mode)
}

// mountedBy returns the host's path of the file that a CDI specification mounts.
func mountedBy(spec []byte) (string, error) {
	var s specs.Spec
	if err := json.Unmarshal(spec, &s); err != nil {
		return "", fmt.Errorf("read a CDI specification: %w", err)
	}
	for _, d := range s.Devices {
		for _, m := range d.ContainerEdits.Mounts {
			return m.HostPath, nil
		}
	}
	return "", errors.New("a CDI specification of device metadata mounts nothing")
}

// writeChanged replaces a file unless it has this content: each change of a CDI directory
// makes container runtimes read it again. It doesn't sync, which would be two syncs for
// each file at each prepare: after a power loss no container is left, and the kubelet has
// each claim prepared again.
func writeChanged(path string, data []byte, mode os.FileMode) error {
	if old, err := os.ReadFile(path); err == nil && bytes.Equal(old, data) {
		return nil
	}
	temp, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*"+tempSuffix)
	if err != nil {
		return err
	}
	_, err = temp.Write(data)
	return files.Replace(path, temp, errors.Join(err, temp.Chmod(mode)))
}

const tempSuffix = ".tmp"

// recoverMetadata removes what is stale, and writes the specifications again that containers
// of prepared claims need, if somebody has removed them. It is for the start, while nothing is
// prepared.
func (p *Plugin) recoverMetadata(ctx context.Context) {
	if err := errors.Join(p.RemoveStaleMetadata(), p.restoreSpecs(p.cfg.Journal.Claims())); err != nil {
		klog.FromContext(ctx).Error(err, "Files about devices of claims that have ended stay on this node, or those of prepared claims lack their CDI specifications", "node", p.cfg.Pool)
	}
}

// RemoveStaleMetadata removes files about devices of claims that aren't on this node any more:
// of one that was unprepared while metadata was off, and of a prepare that ended together
// with the claim's unprepare. If the plugin has only waited for another driver of its name to end,
// they are that driver's, and stay. The plugin must not be running.
func (p *Plugin) RemoveStaleMetadata() error {
	if !p.wasAlone {
		return nil
	}
	claims := p.cfg.Journal.Claims()
	return errors.Join(p.removeStaleSpecs(claims), p.removeStaleFiles(claims))
}

// removeStaleSpecs removes the CDI specifications of claims that have ended.
func (p *Plugin) removeStaleSpecs(claims holding.Claims) error {
	entries, err := entriesOf(p.cfg.CDIDir)
	for _, e := range entries {
		uid, ours := p.claimOfSpec(strings.TrimPrefix(e.Name(), "."))
		if !ours || strings.HasSuffix(e.Name(), ".json") && hasUID(claims, uid) {
			continue
		}
		err = errors.Join(err, files.RemoveIfThere(filepath.Join(p.cfg.CDIDir, e.Name())))
	}
	return err
}

// removeStaleFiles removes the directories of claims that have ended. A claim whose record
// can't be read may have any.
func (p *Plugin) removeStaleFiles(claims holding.Claims) error {
	if len(claims.Unreadable()) > 0 {
		return nil
	}
	root := MetadataDirectory(p.cfg.Root, p.cfg.Driver)
	entries, err := entriesOf(root)
	for _, e := range entries {
		isOf := func(c holding.Claim) bool { return c.Namespace+"_"+c.Name == e.Name() }
		if !slices.ContainsFunc(claims, isOf) {
			err = errors.Join(err, os.RemoveAll(filepath.Join(root, e.Name())))
		}
	}
	return err
}

// restoreSpecs writes the CDI specifications of prepared claims again: containers that start
// again are given them without another prepare. A copy that a power loss has truncated isn't
// one: the kubelet has the claim prepared again.
func (p *Plugin) restoreSpecs(claims holding.Claims) error {
	copies, err := filepath.Glob(filepath.Join(MetadataDirectory(p.cfg.Root, p.cfg.Driver), "*", "*", p.specPrefix()+"*.json"))
	for _, c := range copies {
		uid, ours := p.claimOfSpec(filepath.Base(c))
		if !ours || !hasUID(claims, uid) {
			continue
		}
		data, readErr := os.ReadFile(c)
		if readErr == nil && json.Valid(data) {
			readErr = writeChanged(filepath.Join(p.cfg.CDIDir, filepath.Base(c)), data, specMode)
		}
		err = errors.Join(err, readErr)
	}
	return err
}

// specMode lets every container runtime read a specification, as kubeletplugin does.
const specMode = 0o644

// specPrefix begins the name of each CDI specification of device metadata, see
// kubeletplugin.CDIDirectory.
func (p *Plugin) specPrefix() string { return p.cfg.Driver + "_metadata_" }

// claimOfSpec returns the UID of the claim in a specification's name.
func (p *Plugin) claimOfSpec(name string) (uid string, ours bool) {
	uid, ours = strings.CutPrefix(name, p.specPrefix())
	uid, _, _ = strings.Cut(uid, "_")
	return uid, ours
}

func hasUID(claims holding.Claims, uid string) bool {
	return slices.ContainsFunc(claims, func(c holding.Claim) bool { return c.ClaimUID == uid })
}

// entriesOf lists a directory; one that doesn't exist has no entries.
func entriesOf(dir string) ([]os.DirEntry, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return entries, err
}
