package preparetest

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/tessera-dra/tessera/pkg/node/journal"
)

// ClaimKind is the CDI vendor and class of claims' devices.
const ClaimKind = "k8s.gpu.nvidia.com/claim"

// State is where a node's state is, at a moment when no prepare or unprepare
// is in progress and recovery has run.
type State struct {
	// Journal and CDI are directories.
	Journal, CDI string
	// Root is the node's root directory: where the paths in CDI specs are.
	Root string
	// BootID of the present boot; empty: not looked at.
	BootID string
}

// Check returns what is wrong, nil where nothing is: a CDI spec without a
// record or a record without its whole spec, two claims holding one GPU, a
// device node in a spec that isn't on the host, a temporary or unreadable
// file. A claim with partitions that was prepared in an earlier boot has no spec
// until the kubelet prepares it again. It changes nothing.
func Check(s State) error {
	records, err := readJournal(s.Journal)
	if err != nil {
		return err
	}
	devices, err := readSpecs(s)
	return errors.Join(err, checkDevices(s, records, devices), checkHolders(records), checkNoTemp(s))
}

// readJournal reads a copy, because opening a journal locks and tidies it.
func readJournal(dir string) ([]journal.Record, error) {
	scratch, err := os.MkdirTemp("", "journal-check-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(scratch)
	copied := filepath.Join(scratch, "journal")
	if err := os.CopyFS(copied, os.DirFS(dir)); err != nil {
		return nil, err
	}
	j, err := journal.Open(copied, nil)
	if err != nil {
		return nil, err
	}
	for _, u := range j.Unreadable() {
		err = errors.Join(err, fmt.Errorf("journal file of claim %s: %w", u.ClaimUID, u.Err))
	}
	return j.All(), errors.Join(err, j.Close())
}

// readSpecs returns the CDI devices of claims, and what is wrong with them.
func readSpecs(s State) (map[string]bool, error) {
	paths, err := filepath.Glob(filepath.Join(s.CDI, "*.json"))
	if err != nil {
		return nil, err
	}
	devices := map[string]bool{}
	var errs []error
	for _, path := range paths {
		data, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		var spec specs.Spec
		if err := json.Unmarshal(data, &spec); err != nil {
			errs = append(errs, fmt.Errorf("CDI spec %s: %w", path, err))
			continue
		}
		if spec.Kind != ClaimKind {
			continue
		}
		for _, d := range spec.Devices {
			devices[d.Name] = true
			errs = append(errs, checkNodes(s.Root, d))
		}
	}
	return devices, errors.Join(errs...)
}

// checkNodes finds device nodes that aren't there.
func checkNodes(root string, d specs.Device) error {
	var errs []error
	for _, n := range d.ContainerEdits.DeviceNodes {
		if n.Type != "" && n.Major != 0 {
			continue // the runtime makes it, whatever the host has
		}
		path := n.HostPath
		if path == "" {
			path = n.Path
		}
		if _, err := os.Stat(filepath.Join(root, path)); err != nil {
			errs = append(errs, fmt.Errorf("CDI device %s: %w", d.Name, err))
		}
	}
	if len(d.ContainerEdits.DeviceNodes) == 0 {
		errs = append(errs, fmt.Errorf("CDI device %s has no device node", d.Name))
	}
	return errors.Join(errs...)
}

// checkDevices compares the records with the CDI devices, both ways.
func checkDevices(s State, records []journal.Record, devices map[string]bool) error {
	var errs []error
	wanted := map[string]bool{}
	for _, r := range records {
		for _, g := range r.Grants {
			device := r.ClaimUID + "-" + string(g.Device)
			wanted[device] = true
			if !devices[device] && !awaitsKubelet(s, r) {
				errs = append(errs, fmt.Errorf("claim %s has no CDI device %s", r.ClaimUID, device))
			}
		}
	}
	for device := range devices {
		if !wanted[device] {
			errs = append(errs, fmt.Errorf("CDI device %s belongs to no record", device))
		}
	}
	return errors.Join(errs...)
}

// awaitsKubelet says whether the claim's partitions went with an earlier boot.
func awaitsKubelet(s State, r journal.Record) bool {
	return s.BootID != "" && r.BootID != s.BootID &&
		slices.ContainsFunc(r.Grants, func(g journal.Grant) bool { return g.Partition != journal.Partition{} })
}

// checkHolders finds devices that two claims hold.
func checkHolders(records []journal.Record) error {
	var errs []error
	for i, r := range records {
		for _, g := range r.Grants {
			for _, other := range records[:i] {
				if !g.Admin && other.Holds(g.Of()) {
					errs = append(errs, fmt.Errorf("claims %s and %s both hold %s", other.ClaimUID, r.ClaimUID, g.Device))
				}
			}
		}
	}
	return errors.Join(errs...)
}

func checkNoTemp(s State) error {
	var errs []error
	for _, dir := range []string{s.Journal, s.CDI} {
		entries, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, err)
		}
		left := slices.DeleteFunc(entries, func(e os.DirEntry) bool { return !strings.HasSuffix(e.Name(), ".tmp") })
		for _, e := range left {
			errs = append(errs, fmt.Errorf("temporary file %s in %s", e.Name(), dir))
		}
	}
	return errors.Join(errs...)
}
