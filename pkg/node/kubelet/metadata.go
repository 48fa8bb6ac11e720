package kubelet

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/dynamic-resource-allocation/api/metadata/v1beta1"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"

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
		kubeletplugin.MetadataFileOps(kubeletplugin.MetadataFileOperations{WriteFile: writeMetadata}),
	}
}

// writeMetadata replaces a file unless it has this content: each change of a CDI directory
// makes container runtimes read it again. It doesn't sync, which would be four syncs for
// each prepare: after a power loss no container is left, and the kubelet has each claim
// prepared again.
func writeMetadata(path string, data []byte, mode os.FileMode) error {
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

// removeStaleMetadata removes files about devices of claims that aren't on this node any more:
// of one that was unprepared while metadata was off, and of a prepare that ended together
// with the claim's unprepare. It is for the start, while nothing is prepared.
func (p *Plugin) removeStaleMetadata(ctx context.Context) {
	claims := p.cfg.Journal.Claims()
	err := errors.Join(p.removeStaleSpecs(claims), p.removeStaleFiles(claims))
	if err != nil {
		klog.FromContext(ctx).Error(err, "Files about devices of claims that have ended stay on this node", "node", p.cfg.Pool)
	}
}

// removeStaleSpecs removes the CDI specifications of claims that have ended.
func (p *Plugin) removeStaleSpecs(claims holding.Claims) error {
	prefix := p.cfg.Driver + "_metadata_"
	entries, err := entriesOf(p.cfg.CDIDir)
	for _, e := range entries {
		uid, ours := strings.CutPrefix(strings.TrimPrefix(e.Name(), "."), prefix)
		uid, _, _ = strings.Cut(uid, "_")
		if !ours || strings.HasSuffix(e.Name(), ".json") && slices.ContainsFunc(claims, func(c holding.Claim) bool { return c.ClaimUID == uid }) {
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

// entriesOf lists a directory; one that doesn't exist has no entries.
func entriesOf(dir string) ([]os.DirEntry, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return entries, err
}
