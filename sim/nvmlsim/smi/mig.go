package smi

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

// migOptions holds the options of "nvidia-smi mig".
type migOptions struct {
	ids []string
	// action is the option that selects the operation: -lgip, -lgipp, -lgi, -lci,
	// -cgi, -cci, -dgi or -dci, with its argument.
	action, argument string
	gi, ci           []string
	alsoCompute      bool
}

const migUsage = `    nvidia-smi mig [-i GPU] OPTION

    -lgip                   List GPU instance profiles.
    -lgipp                  List possible placements of GPU instances.
    -lgi                    List GPU instances.
    -lci                    List compute instances.
    -cgi PROFILE[:START],…  Create GPU instances, by profile name or id; with -C also a compute instance in each.
    -cci [PROFILE,…]        Create compute instances (default: all of the GPU instance), in those of -gi.
    -dgi                    Destroy GPU instances, those of -gi or all.
    -dci                    Destroy compute instances, those of -ci and -gi or all.
`

func parseMIG(args []string) (migOptions, error) {
	var o migOptions
	next := func(i *int) string {
		if *i+1 < len(args) && !strings.HasPrefix(args[*i+1], "-") {
			*i++
			return args[*i]
		}
		return ""
	}
	for i := 0; i < len(args); i++ {
		switch a := args[i]; a {
		case "-i", "--id":
			o.ids = strings.Split(next(&i), ",")
		case "-gi", "--gpu-instance-id":
			o.gi = strings.Split(next(&i), ",")
		case "-ci", "--compute-instance-id":
			o.ci = strings.Split(next(&i), ",")
		case "-C", "--default-compute-instance":
			o.alsoCompute = true
		case "-lgip", "-lgipp", "-lgi", "-lci", "-cgi", "-cci", "-dgi", "-dci":
			o.action = a
			o.argument = next(&i)
		default:
			return o, fmt.Errorf("Option \"%s\" is not recognized. Please run 'nvidia-smi mig -h' for help.", a) //nolint:staticcheck // nvidia-smi's words
		}
	}
	if o.action == "" {
		return o, errors.New(migUsage) //nolint:staticcheck // nvidia-smi's words
	}
	return o, nil
}

// runMIG is "nvidia-smi mig".
func runMIG(o migOptions, m *nvmlsim.Machine, out io.Writer) (int, error) {
	picked, err := pick(m, o.ids)
	if err != nil {
		return exitNotFound, err
	}
	var gpus []*nvmlsim.GPU
	for _, g := range picked {
		if on, _, err := g.MIGMode(); err == nil && (on || o.action == "-lgip" || o.action == "-lgipp") {
			gpus = append(gpus, g)
		}
	}
	if len(gpus) == 0 {
		return exitNotFound, errors.New("No MIG-enabled devices found.") //nolint:staticcheck // nvidia-smi's words
	}
	act := map[string]func(migOptions, *nvmlsim.GPU, *strings.Builder) error{
		"-lgip": listProfiles, "-lgipp": listPlacements, "-lgi": listInstances, "-lci": listComputes,
		"-cgi": createInstances, "-cci": createComputes, "-dgi": destroyInstances, "-dci": destroyComputes,
	}[o.action]
	var b strings.Builder
	for _, g := range gpus {
		if err = act(o, g, &b); err != nil {
			break
		}
	}
	if b.Len() == 0 && err == nil {
		return exitNotFound, fmt.Errorf("No %s instances found: %w", map[bool]string{true: "GPU", false: "compute"}[strings.HasSuffix(o.action, "gi")], nvmlsim.NotFound) //nolint:staticcheck // nvidia-smi's words
	}
	if _, werr := io.WriteString(out, heads[o.action]+b.String()+feet[o.action]); werr != nil {
		return exitUnknown, werr
	}
	if err != nil {
		return int(nvmlsim.Code(err)), err
	}
	return exitOK, nil
}

const (
	profileRule  = "+-------------------------------------------------------------------------------+\n"
	instanceRule = "+---------------------------------------------------------+\n"
	computeRule  = "+----------------------------------------------------------------------+\n"
)

//nolint:gochecknoglobals // constant
var heads = map[string]string{
	"-lgip": profileRule +
		"| GPU instance profiles:                                                        |\n" +
		"| GPU   Name               ID    Instances   Memory     P2P    SM    DEC   ENC  |\n" +
		"|                                Free/Total   GiB              CE    JPEG  OFA  |\n" +
		"|===============================================================================|\n",
	"-lgi": instanceRule +
		"| GPU instances:                                          |\n" +
		"| GPU   Name               Profile  Instance   Placement  |\n" +
		"|                            ID       ID       Start:Size |\n" +
		"|=========================================================|\n",
	"-lci": computeRule +
		"| Compute instances:                                                   |\n" +
		"| GPU     GPU       Name               Profile   Instance   Placement  |\n" +
		"|       Instance                         ID        ID       Start:Size |\n" +
		"|         ID                                                           |\n" +
		"|======================================================================|\n",
}

//nolint:gochecknoglobals // constant
var feet = map[string]string{"-lgi": instanceRule, "-lci": computeRule}

func listProfiles(_ migOptions, g *nvmlsim.GPU, b *strings.Builder) error {
	for _, p := range g.Model().MIG.Profiles {
		free, _ := g.RemainingCapacity(p.ID) // none while the mode is off
		fmt.Fprintf(b, "| %3d  MIG %-14s %3d    %3d/%-3d    %6.2f       %-3s   %3d   %3d   %3d  |\n", index(g), p.Name, p.ID, free, p.InstanceCount,
			float64(p.MemorySizeMB)/1024, map[bool]string{true: "Yes", false: "No"}[p.P2P], p.MultiprocessorCount, p.DecoderCount, p.EncoderCount)
		fmt.Fprintf(b, "| %60s%3d   %3d   %3d  |\n%s", "", p.CopyEngineCount, p.JPEGCount, p.OFACount, profileRule)
	}
	return nil
}

func listPlacements(_ migOptions, g *nvmlsim.GPU, b *strings.Builder) error {
	for _, p := range g.Model().MIG.Profiles {
		starts := make([]string, len(p.Starts))
		for i, s := range p.Starts {
			starts[i] = fmt.Sprint(s)
		}
		fmt.Fprintf(b, "GPU %2d Profile ID %2d Placement%s: {%s}:%d\n", index(g), p.ID, plural(len(starts)), strings.Join(starts, ","), p.Size)
	}
	return nil
}

func plural(n int) string {
	if n > 1 {
		return "s"
	}
	return ""
}

// instancesOf returns the GPU instances of -gi, or all, by id.
func instancesOf(o migOptions, g *nvmlsim.GPU) ([]nvmlsim.Instance, error) {
	var all []nvmlsim.Instance
	for _, p := range g.Model().MIG.Profiles {
		some, err := g.Instances(p.ID)
		if err != nil {
			return nil, err
		}
		all = append(all, some...)
	}
	if len(o.gi) > 0 {
		all = slices.DeleteFunc(all, func(i nvmlsim.Instance) bool {
			info, err := i.Info()
			return err != nil || !slices.Contains(o.gi, fmt.Sprint(info.ID))
		})
	}
	return all, nil
}

// computesOf returns the compute instances of a GPU instance that -ci selects,
// or all.
func computesOf(o migOptions, i nvmlsim.Instance) ([]nvmlsim.Compute, nvmlsim.GPUInstance, error) {
	info, err := i.Info()
	if err != nil {
		return nil, info, err
	}
	var all []nvmlsim.Compute
	for _, c := range info.Compute {
		if len(o.ci) > 0 && !slices.Contains(o.ci, fmt.Sprint(c.ID)) {
			continue
		}
		ci, err := i.ComputeByID(c.ID)
		if err != nil {
			return nil, info, err
		}
		all = append(all, ci)
	}
	return all, info, nil
}

func listInstances(o migOptions, g *nvmlsim.GPU, b *strings.Builder) error {
	all, err := instancesOf(o, g)
	for _, i := range all {
		info, infoErr := i.Info()
		p, profileErr := g.ProfileByID(info.Profile)
		if infoErr != nil || profileErr != nil {
			continue // destroyed in the meantime
		}
		fmt.Fprintf(b, "| %3d  MIG %-15s %4d     %4d      %5d:%-5d |\n", index(g), p.Name, info.Profile, info.ID, info.Start, info.Size)
	}
	return err
}

func listComputes(o migOptions, g *nvmlsim.GPU, b *strings.Builder) error {
	return eachCompute(o, g, func(c nvmlsim.Compute, gi nvmlsim.GPUInstance) error {
		info, err := c.Info()
		if err != nil {
			return err
		}
		name, err := c.ProfileName()
		fmt.Fprintf(b, "| %3d    %4d       MIG %-15s %4d      %4d     %5d:%-5d |\n", index(g), gi.ID, name, info.Profile, info.ID, info.Start, info.Size)
		return err
	})
}

func eachCompute(o migOptions, g *nvmlsim.GPU, do func(nvmlsim.Compute, nvmlsim.GPUInstance) error) error {
	all, err := instancesOf(o, g)
	if err != nil {
		return err
	}
	for _, i := range all {
		computes, gi, err := computesOf(o, i)
		if err != nil {
			return err
		}
		for _, c := range computes {
			if err := do(c, gi); err != nil {
				return err
			}
		}
	}
	return nil
}

func createInstances(o migOptions, g *nvmlsim.GPU, b *strings.Builder) error {
	for want := range strings.SplitSeq(o.argument, ",") {
		name, start, placed := strings.Cut(want, ":")
		i := slices.IndexFunc(g.Model().MIG.Profiles, func(p nvmlsim.Profile) bool {
			return name == p.Name || name == "MIG "+p.Name || name == fmt.Sprint(p.ID)
		})
		if i < 0 {
			return fmt.Errorf("Unable to parse profile \"%s\": %w", name, nvmlsim.InvalidArgument) //nolint:staticcheck // nvidia-smi's words
		}
		p := g.Model().MIG.Profiles[i]
		var at *uint32
		if placed {
			n, err := strconv.ParseUint(start, 10, 32)
			if err != nil {
				return fmt.Errorf("Unable to parse placement \"%s\": %w", start, nvmlsim.InvalidArgument) //nolint:staticcheck // nvidia-smi's words
			}
			s := uint32(n)
			at = &s
		}
		made, err := g.CreateInstance(p.ID, at)
		if err != nil {
			return fmt.Errorf("Unable to create a GPU instance on GPU %2d using profile %d: %w", index(g), p.ID, err) //nolint:staticcheck // nvidia-smi's words
		}
		info, err := made.Info()
		if err != nil {
			return err
		}
		fmt.Fprintf(b, "Successfully created GPU instance ID %2d on GPU %2d using profile MIG %s (ID %2d)\n", info.ID, index(g), p.Name, p.ID)
		if o.alsoCompute {
			if err := createCompute(g, made, "", b); err != nil {
				return err
			}
		}
	}
	return nil
}

func createComputes(o migOptions, g *nvmlsim.GPU, b *strings.Builder) error {
	all, err := instancesOf(o, g)
	if err != nil {
		return err
	}
	for _, i := range all {
		for want := range strings.SplitSeq(o.argument, ",") {
			if err := createCompute(g, i, want, b); err != nil {
				return err
			}
		}
	}
	return nil
}

// createCompute creates a compute instance of a profile, by name or id; "" is
// all of the GPU instance.
func createCompute(g *nvmlsim.GPU, i nvmlsim.Instance, want string, b *strings.Builder) error {
	info, err := i.Info()
	if err != nil {
		return err
	}
	for enum := range uint32(9) {
		p, err := i.ComputeProfile(enum)
		if err != nil || (want == "" && p.Name() != p.Parent.Name) || (want != "" && want != p.Name() && want != fmt.Sprint(p.ID)) {
			continue
		}
		c, err := i.CreateCompute(p.ID, nil)
		if err != nil {
			return fmt.Errorf("Unable to create a compute instance on GPU %2d GPU instance ID %2d using profile %d: %w", index(g), info.ID, p.ID, err) //nolint:staticcheck // nvidia-smi's words
		}
		ci, err := c.Info()
		fmt.Fprintf(b, "Successfully created compute instance ID %2d on GPU %2d GPU instance ID %2d using profile MIG %s (ID %2d)\n", ci.ID, index(g), info.ID, p.Name(), p.ID)
		return err
	}
	return fmt.Errorf("Unable to parse profile \"%s\": %w", want, nvmlsim.InvalidArgument) //nolint:staticcheck // nvidia-smi's words
}

func destroyInstances(o migOptions, g *nvmlsim.GPU, b *strings.Builder) error {
	all, err := instancesOf(o, g)
	if err != nil {
		return err
	}
	for _, i := range all {
		info, err := i.Info()
		if err != nil {
			return err
		}
		if err := i.Destroy(); err != nil {
			return fmt.Errorf("Unable to destroy GPU instance ID %2d from GPU %2d: %w", info.ID, index(g), err) //nolint:staticcheck // nvidia-smi's words
		}
		fmt.Fprintf(b, "Successfully destroyed GPU instance ID %2d from GPU %2d\n", info.ID, index(g))
	}
	return nil
}

func destroyComputes(o migOptions, g *nvmlsim.GPU, b *strings.Builder) error {
	return eachCompute(o, g, func(c nvmlsim.Compute, gi nvmlsim.GPUInstance) error {
		info, err := c.Info()
		if err != nil {
			return err
		}
		if err := c.Destroy(); err != nil {
			return fmt.Errorf("Unable to destroy compute instance ID %2d from GPU %2d GPU instance ID %2d: %w", info.ID, index(g), gi.ID, err) //nolint:staticcheck // nvidia-smi's words
		}
		fmt.Fprintf(b, "Successfully destroyed compute instance ID %2d from GPU %2d GPU instance ID %2d\n", info.ID, index(g), gi.ID)
		return nil
	})
}

// setMIGMode is "nvidia-smi -mig 0|1".
func setMIGMode(gpus []*nvmlsim.GPU, on bool, out io.Writer) (int, error) {
	verb := map[bool]string{true: "enable", false: "disable"}[on]
	var b strings.Builder
	for _, g := range gpus {
		activation, err := g.SetMIGMode(on)
		if err != nil {
			return int(nvmlsim.Code(err)), fmt.Errorf("Unable to %s MIG Mode for GPU %s: %w", verb, busID(g), err) //nolint:staticcheck // nvidia-smi's words
		}
		if activation != nvmlsim.Success {
			fmt.Fprintf(&b, "Warning: MIG mode is in pending %s state for GPU %s:%s\n", verb, busID(g), activation.Error())
			continue
		}
		fmt.Fprintf(&b, "%sd MIG Mode for GPU %s\n", strings.ToUpper(verb[:1])+verb[1:], busID(g))
	}
	b.WriteString("All done.\n")
	_, err := io.WriteString(out, b.String())
	return exitOK, err
}
