package doctor

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/holding"
)

const restart = "restart the plugin's pod on this node: when it starts it writes all CDI specs again and removes those without a claim"

// specDevice is a CDI device of a claim.
type specDevice struct {
	path   string // path of the spec
	nodes  []*specs.DeviceNode
	mounts []*specs.Mount
}

// readSpecs reads this driver's specs, and reports the problems of each.
func (l *look) readSpecs() error {
	entries, err := os.ReadDir(l.CDI)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("list the CDI directory: %w", err)
	}
	for _, e := range entries {
		path := filepath.Join(l.CDI, e.Name())
		switch {
		case !strings.HasPrefix(e.Name(), gpu.CDIVendor+"-"):
		case strings.HasSuffix(e.Name(), ".tmp"):
			l.add(temporary(path))
		case strings.HasSuffix(e.Name(), ".json"):
			if err := l.readSpec(path); err != nil && !errors.Is(err, fs.ErrNotExist) { // removed in the meantime
				l.add(Finding{Level: Trouble, Check: "cdi-spec-unreadable", Path: path, What: fmt.Sprintf("the CDI spec can't be read: %v", err), Do: restart})
			}
		}
	}
	return nil
}

func (l *look) readSpec(path string) error {
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	var spec specs.Spec
	if err := json.Unmarshal(data, &spec); err != nil {
		return err
	}
	if spec.Kind != gpu.CDIClaimKind && spec.Kind != gpu.CDICommonKind {
		return nil
	}
	l.common = l.common || spec.Kind == gpu.CDICommonKind
	l.checkPaths(path, "", &spec.ContainerEdits)
	for _, d := range spec.Devices {
		l.checkPaths(path, d.Name, &d.ContainerEdits)
		if spec.Kind == gpu.CDIClaimKind {
			l.specs[d.Name] = specDevice{path: path, nodes: d.ContainerEdits.DeviceNodes, mounts: d.ContainerEdits.Mounts}
		}
	}
	return nil
}

// The advice for paths in a CDI spec that the host lacks.
const (
	mendNode    = "run `nvidia-modprobe -u -c0` on the node to create device nodes; if a GPU is lost, reset it or reboot the node"
	mendLibrary = "complete the driver's installation; the plugin finds the files soon, or when its pod is restarted"
	mendHook    = "restart the plugin's pod on this node: it installs the hook when it starts"
)

// checkPaths reports paths that a container runtime would not find.
func (l *look) checkPaths(path, device string, edits *specs.ContainerEdits) {
	missing := func(what, file, do string) {
		if _, err := l.stat(filepath.Join("/", file)); err != nil {
			l.add(Finding{
				Level: Trouble, Check: "cdi-path-missing", Path: path, Device: device, Do: do,
				What: fmt.Sprintf("the CDI spec names the %s %s, which the host doesn't have: containers that need it can't start", what, file),
			})
		}
	}
	for _, n := range edits.DeviceNodes {
		if made := n.Type != "" && n.Major != 0; !made { // else the runtime makes it, whatever the host has
			missing("device node", orElse(n.HostPath, n.Path), mendNode)
		}
	}
	for _, m := range edits.Mounts {
		missing("file", m.HostPath, mendLibrary)
	}
	for _, h := range edits.Hooks {
		missing("hook", h.Path, mendHook)
		if noexec, err := l.Host.NoExec(filepath.Dir(h.Path)); err == nil && noexec {
			l.add(Finding{
				Level: Trouble, Check: "cdi-hook-noexec", Path: path, Device: device,
				What: fmt.Sprintf("the CDI spec names the hook %s, and the host mounts that directory noexec: containers with a GPU can't start", h.Path),
				Do:   "restart the plugin's pod on this node: it chooses a directory for the hook when it starts",
			})
		}
	}
}

// checkHookDir reports that claims can't be prepared because there is no place for the hook.
func (l *look) checkHookDir() {
	if l.NoHookDir != nil {
		l.add(Finding{
			Level: Trouble, Check: "cdi-hook-noexec", Path: l.CDI, What: "claims can't be prepared: " + l.NoHookDir.Error(),
			Do: "drain the node and set node.dataDir to a directory of a file system that isn't mounted noexec, or mount one of these directories exec",
		})
	}
}

func orElse(a, b string) string {
	if a != "" {
		return a
	}
	return b
}

// checkSpecs compares the CDI devices with the records, in both directions.
func (l *look) checkSpecs() {
	wanted, known := map[string]bool{}, map[string]bool{}
	for _, r := range l.journal.Claims {
		for _, g := range r.Holdings {
			device := r.ClaimUID + "-" + string(g.CDIName())
			wanted[device] = true
			l.checkDevice(r, device)
		}
	}
	for _, u := range l.journal.Unreadable {
		known[u.ClaimUID] = true
	}
	for device, d := range l.specs {
		uid := strings.TrimSuffix(strings.TrimPrefix(filepath.Base(d.path), gpu.CDIVendor+"-claim_"), ".json")
		if !wanted[device] && !known[uid] {
			l.add(Finding{
				Level: Trouble, Check: "cdi-device-without-claim", Device: device, Path: d.path,
				What: "the CDI spec gives a device to a claim that isn't prepared", Do: restart,
			})
		}
	}
	if l.Hardware != nil && len(l.specs) > 0 && !l.common {
		l.add(Finding{
			Level: Trouble, Check: "cdi-common-missing", Path: l.CDI,
			What: "the CDI spec that all claims share (" + gpu.CDICommonKind + ") is missing: containers with a GPU can't start", Do: restart,
		})
	}
}

// checkDevice reports a held device that has no CDI device, or an empty one.
func (l *look) checkDevice(r holding.Record, device string) {
	d, ok := l.specs[device]
	switch {
	case ok && len(d.nodes) == 0:
		l.add(Finding{
			Level: Trouble, Check: "cdi-device-empty", Claim: claimName(r), Device: device, Path: d.path,
			What: "the CDI spec gives the claim's containers no device node", Do: restart,
		})
	case !ok && r.GivenUp == nil && !r.AwaitsKubelet(l.BootID):
		l.add(Finding{
			Level: Trouble, Check: "cdi-device-missing", Claim: claimName(r), Device: device, Path: l.CDI,
			What: "the claim is prepared, and the CDI directory has no such device: its containers can't start or restart",
			Do:   restart + "; the plugin's log says why that fails",
		})
	}
}
