package kubelet_test

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/dynamic-resource-allocation/api/metadata/v1beta1"
	"k8s.io/dynamic-resource-allocation/devicemetadata"
	drapbv1 "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/tessera-dra/tessera/pkg/node/kubelet"
)

// filesBelow returns the paths of the files below directories, sorted.
func filesBelow(t *testing.T, dirs ...string) []string {
	t.Helper()
	var all []string
	for _, dir := range dirs {
		err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
			if err == nil && !e.IsDir() {
				all = append(all, path)
			}
			return err
		})
		if err != nil && !os.IsNotExist(err) {
			t.Fatal(err)
		}
	}
	slices.Sort(all)
	return all
}

// TestMetadata: a container with a device of the claim gets a file with the device's
// attributes, from the prepare until the unprepare.
func TestMetadata(t *testing.T) {
	root := kubeletRoot(t)
	cdi, data := filepath.Join(root, "cdi"), kubelet.MetadataDirectory(root, driver)
	f := runWith(t, kubelet.Config{Root: root, CDIDir: cdi, DeviceMetadata: true}, "good")
	f.register(t)
	request := []*drapbv1.Claim{{Namespace: "default", Name: "good", Uid: "good"}}
	var prepared *drapbv1.NodePrepareResourcesResponse
	var spec []byte
	for range 2 { // the second time, nothing changes
		var err error
		prepared, err = f.service(t).NodePrepareResources(t.Context(), &drapbv1.NodePrepareResourcesRequest{Claims: request})
		if err != nil {
			t.Fatal(err)
		}
		all := filesBelow(t, cdi, data)
		if len(all) != 3 {
			t.Fatalf("got files %v, want a specification, its copy and what it mounts", all)
		}
		if spec, err = os.ReadFile(all[0]); err != nil {
			t.Fatal(err)
		}
	}
	ids := prepared.GetClaims()["good"].GetDevices()[0].GetCdiDeviceIds()
	if len(ids) != 2 || !strings.HasPrefix(ids[1], driver+"/metadata=") {
		t.Errorf("got CDI devices %v, want the file's after the device's", ids)
	}
	checkMetadata(t, spec)
	if _, err := f.service(t).NodeUnprepareResources(t.Context(), &drapbv1.NodeUnprepareResourcesRequest{Claims: request}); err != nil {
		t.Fatal(err)
	}
	if left := filesBelow(t, cdi, data); left != nil {
		t.Errorf("after the unprepare: %v", left)
	}
}

// checkMetadata follows a specification to its file, and reads that as a program does.
func checkMetadata(t *testing.T, spec []byte) {
	t.Helper()
	var s struct {
		Devices []struct {
			ContainerEdits struct {
				Mounts []struct{ HostPath, ContainerPath string }
			}
		}
	}
	if err := json.Unmarshal(spec, &s); err != nil {
		t.Fatal(err)
	}
	mount := s.Devices[0].ContainerEdits.Mounts[0]
	const want = "/var/run/kubernetes.io/dra-device-attributes/resourceclaims/good/gpu/gpu.nvidia.com-metadata.json"
	if mount.ContainerPath != want {
		t.Errorf("got it at %s, want %s", mount.ContainerPath, want)
	}
	file, err := os.Open(mount.HostPath)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if info, err := file.Stat(); err != nil || info.Mode().Perm() != 0o644 {
		t.Errorf("got mode %v, %v; any user of a container may read it", info.Mode(), err)
	}
	var m v1beta1.DeviceMetadata
	if err := devicemetadata.DecodeMetadataFromStream(json.NewDecoder(file), &m); err != nil {
		t.Fatal(err)
	}
	d := m.Requests[0].Devices[0]
	if uuid := d.Attributes["uuid"].StringValue; m.Name != "good" || d.Name != "gpu-0" || uuid == nil || *uuid != "GPU-0" {
		t.Errorf("got %+v", m)
	}
}

// TestMetadataOff: without it, containers get no file.
func TestMetadataOff(t *testing.T) {
	root := kubeletRoot(t)
	cdi := filepath.Join(root, "cdi")
	f := runWith(t, kubelet.Config{Root: root, CDIDir: cdi}, "good")
	f.register(t)
	prepared, err := f.service(t).NodePrepareResources(t.Context(), &drapbv1.NodePrepareResourcesRequest{Claims: []*drapbv1.Claim{{Namespace: "default", Name: "good", Uid: "good"}}})
	if err != nil {
		t.Fatal(err)
	}
	if ids := prepared.GetClaims()["good"].GetDevices()[0].GetCdiDeviceIds(); len(ids) != 1 {
		t.Errorf("got CDI devices %v", ids)
	}
	if all := filesBelow(t, cdi, kubelet.MetadataDirectory(root, driver)); all != nil {
		t.Errorf("got files %v", all)
	}
}

// TestMetadataOfEndedClaims: a plugin that starts, and one that has ended, removes the files of
// claims that it has no record of, which were unprepared by one without metadata, and keeps
// all others.
func TestMetadataOfEndedClaims(t *testing.T) {
	root := kubeletRoot(t)
	cdi, data := filepath.Join(root, "cdi"), kubelet.MetadataDirectory(root, driver)
	kept := []string{
		filepath.Join(cdi, "gpu.nvidia.com_metadata_training_gpu.json"), // the journal's claim
		filepath.Join(cdi, "nic.example.com_metadata_gone_nic.json"),
		filepath.Join(data, "default_training", "gpu", "metadata.json"),
	}
	slices.Sort(kept)
	create := func() {
		for _, path := range slices.Concat(kept, []string{
			filepath.Join(cdi, "gpu.nvidia.com_metadata_gone_gpu.json"),
			filepath.Join(cdi, ".gpu.nvidia.com_metadata_training_gpu.json.17.tmp"),
			filepath.Join(data, "default_gone", "gpu", "metadata.json"),
		}) {
			if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
				t.Fatal(err)
			}
			if f, err := os.Create(path); err != nil || f.Close() != nil {
				t.Fatal(err)
			}
		}
	}
	check := func(when string) {
		if diff := cmp.Diff(kept, filesBelow(t, cdi, data)); diff != "" {
			t.Errorf("%s: -want +got:\n%s", when, diff)
		}
	}
	create()
	f := runWith(t, kubelet.Config{Root: root, CDIDir: cdi, DeviceMetadata: true})
	f.register(t)
	check("when it has started")
	if err := f.stop(); err != nil {
		t.Fatal(err)
	}
	create()
	if err := f.plugin.RemoveStaleMetadata(); err != nil {
		t.Fatal(err)
	}
	check("when it has ended")
}

// TestMetadataOfAnotherDriver: a plugin that has only waited for another driver of its name to end
// removes nothing of that driver's.
func TestMetadataOfAnotherDriver(t *testing.T) {
	other := run(t, kubeletRoot(t))
	other.register(t)
	cdi := filepath.Join(other.root, "cdi")
	theirs := filepath.Join(cdi, "gpu.nvidia.com_metadata_theirs_gpu.json")
	if err := errors.Join(os.MkdirAll(cdi, 0o755), os.WriteFile(theirs, []byte("{}"), 0o644)); err != nil {
		t.Fatal(err)
	}
	f := runWith(t, kubelet.Config{Root: other.root, CDIDir: cdi, DeviceMetadata: true})
	f.awaitConflict(t, true)
	if err := f.stop(); err != nil {
		t.Fatal(err)
	}
	if err := f.plugin.RemoveStaleMetadata(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(theirs); err != nil {
		t.Error(err)
	}
}

// TestMetadataAfterWipe: somebody empties the CDI directory. The plugin that starts then puts
// the specifications of prepared claims back: containers that start again need them, and the
// kubelet doesn't ask.
func TestMetadataAfterWipe(t *testing.T) {
	nothing := func(*testing.T, string) {}
	for name, c := range map[string]struct {
		off  bool                            // of the plugin that starts then
		then func(t *testing.T, data string) // what else happens
		want bool
	}{
		"by one with metadata": {then: nothing, want: true},
		"by one without":       {off: true, then: nothing, want: true},
		"after a power loss":   {then: truncateAll},
		"but of no claim that ended": {then: func(t *testing.T, data string) {
			t.Helper()
			rename(t, filepath.Join(data, "default_training", "gpu", "gpu.nvidia.com_metadata_training_gpu.json"), "gpu.nvidia.com_metadata_gone_gpu.json")
		}},
	} {
		t.Run(name, func(t *testing.T) {
			root := kubeletRoot(t)
			cdi, data := filepath.Join(root, "cdi"), kubelet.MetadataDirectory(root, driver)
			f := runWith(t, kubelet.Config{Root: root, CDIDir: cdi, DeviceMetadata: true}, "training") // as in the journal
			f.register(t)
			request := []*drapbv1.Claim{{Namespace: "default", Name: "training", Uid: "training"}}
			if _, err := f.service(t).NodePrepareResources(t.Context(), &drapbv1.NodePrepareResourcesRequest{Claims: request}); err != nil {
				t.Fatal(err)
			}
			want := map[string]string{}
			if c.want {
				want = contents(t, cdi)
			}
			if err := f.stop(); err != nil {
				t.Fatal(err)
			}
			if err := errors.Join(os.RemoveAll(cdi), os.Mkdir(cdi, 0o755)); err != nil {
				t.Fatal(err)
			}
			c.then(t, data)
			f = runWith(t, kubelet.Config{Root: root, CDIDir: cdi, DeviceMetadata: !c.off}, "training")
			f.register(t)
			if diff := cmp.Diff(want, contents(t, cdi)); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

// contents returns the files below a directory.
func contents(t *testing.T, dir string) map[string]string {
	t.Helper()
	all := map[string]string{}
	for _, path := range filesBelow(t, dir) {
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		all[path] = string(data)
	}
	return all
}

func truncateAll(t *testing.T, dir string) {
	t.Helper()
	for _, path := range filesBelow(t, dir) {
		if err := os.Truncate(path, 0); err != nil {
			t.Fatal(err)
		}
	}
}

func rename(t *testing.T, path, name string) {
	t.Helper()
	if err := os.Rename(path, filepath.Join(filepath.Dir(path), name)); err != nil {
		t.Fatal(err)
	}
}
