package doctor

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// checkCapabilities reports device nodes that give a container access to
// another instance than the claim's, or to none: the ids, and with them the
// nodes, may have changed since the spec was written.
func (p *gpuLook) checkCapabilities(base Finding, d specDevice, i gpu.Instance) {
	dir := fmt.Sprintf("%s/gpu%d/mig/gi%d", p.Capabilities, p.gpu.Minor, i.GPUInstanceID)
	for _, file := range []string{dir + "/access", fmt.Sprintf("%s/ci%d/access", dir, i.ComputeInstanceID)} {
		minor, err := p.capability(file)
		if err != nil {
			base.Check, base.Path = "capability-unreadable", file
			base.What = fmt.Sprintf("the driver doesn't list the device node for access to %s: %v", describeInstance(i), err)
			base.Do = "check whether `nvidia-smi -L` lists the MIG device; if it doesn't, reboot the node"
			p.add(base)
			continue
		}
		node := fmt.Sprintf("/dev/nvidia-caps/nvidia-cap%d", minor)
		if !slices.ContainsFunc(d.nodes, func(n *specs.DeviceNode) bool { return n.Path == node }) {
			base.Check, base.Path = "cdi-capability-wrong", d.path
			base.What = fmt.Sprintf("the CDI spec lacks %s, which gives access to %s", node, describeInstance(i))
			base.Do = restart + "; then delete the claim's pods"
			p.add(base)
		}
	}
}

// capability reads the minor number of a capability's device node.
func (p *gpuLook) capability(file string) (int, error) {
	var data []byte
	err := p.Host.Do(func() (err error) {
		data, err = os.ReadFile(file)
		return err
	})
	if err != nil {
		return 0, err
	}
	for lines := bufio.NewScanner(bytes.NewReader(data)); lines.Scan(); {
		if minor, ok := strings.CutPrefix(lines.Text(), "DeviceFileMinor:"); ok {
			return strconv.Atoi(strings.TrimSpace(minor))
		}
	}
	return 0, errors.New("no DeviceFileMinor")
}
