package driver

import (
	"errors"
	"fmt"
	"slices"

	"github.com/tessera-dra/tessera/pkg/driverroot"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

// errOtherLibrary says that a new process is needed.
var errOtherLibrary = errors.New("the plugin must be restarted to load the library of another driver")

// Opener finds and opens the driver for the Followers of a process, which run one after
// the other. Its methods must not be called concurrently.
type Opener struct {
	// host is where the driver is looked for, under driverRoot only unless that is empty.
	host       driverroot.Host
	driverRoot string
	nvml       *nvml.Opener
	// loaded is the NVML library that this process has loaded, if any: go-nvml's functions
	// stay bound to the first one.
	loaded string
	// ahead is the session of OpenAhead with the driver at aheadRoot, nil if there is none.
	ahead     *nvml.Session
	aheadRoot driverroot.Root
	// unclosed are sessions that could not be closed. They keep all GPUs open, so that none
	// can be reset.
	unclosed []*nvml.Session
}

// NewOpener returns an Opener of the driver at driverRoot or, if driverRoot is empty, of
// the driver that is found on the host.
func NewOpener(host driverroot.Host, driverRoot string) *Opener {
	return &Opener{host: host, driverRoot: driverRoot, nvml: nvml.NewOpener()}
}

// OpenAhead opens the driver for the next Follower and registers the GPUs for events. It
// takes seconds to open GPUs that no program has open, so this is done while the plugin
// before still has them open. If only the registration fails, the driver stays open.
func (o *Opener) OpenAhead() error {
	root, session, err := o.open()
	if err != nil {
		return err
	}
	o.ahead, o.aheadRoot = session, root
	if err := session.Listen(); err != nil && !errors.Is(err, nvml.ErrNotSupported) {
		return fmt.Errorf("register GPUs for events: %w", err)
	}
	return nil
}

// CloseAhead closes the session of OpenAhead, if no Follower uses it.
func (o *Opener) CloseAhead() error {
	if o.ahead == nil {
		return nil
	}
	if err := o.ahead.Close(); err != nil {
		return err // it is used, or closed, later
	}
	o.ahead = nil
	return nil
}

// close closes a session, and those that could not be closed. If one can't be closed now,
// because a call into the driver doesn't return, closeRest closes it.
func (o *Opener) close(session *nvml.Session) error {
	o.unclosed = append(o.unclosed, session)
	return o.closeRest()
}

// closeRest closes the sessions that could not be closed. It returns an error if there are
// such sessions still.
func (o *Opener) closeRest() error {
	var errs []error
	o.unclosed = slices.DeleteFunc(o.unclosed, func(s *nvml.Session) bool {
		err := s.Close()
		errs = append(errs, err)
		return err == nil
	})
	return errors.Join(errs...)
}

// find finds the driver.
func (o *Opener) find() (driverroot.Root, error) { return driverroot.Find(o.host, o.driverRoot) }

// open finds the driver and opens it, or returns the session of OpenAhead.
func (o *Opener) open() (driverroot.Root, *nvml.Session, error) {
	root, err := o.find()
	if err != nil {
		return root, nil, errors.Join(err, o.CloseAhead())
	}
	if session := o.ahead; session != nil && sameRoot(root, o.aheadRoot) {
		o.ahead = nil
		return root, session, nil
	}
	if err := o.CloseAhead(); err != nil {
		return root, nil, fmt.Errorf("close the driver at %s: %w", o.aheadRoot.Path, err)
	}
	if o.loaded != "" && o.loaded != root.Library {
		return root, nil, fmt.Errorf("%w: it was %s, now it is %s", errOtherLibrary, o.loaded, root.Library)
	}
	session, err := o.nvml.Open(o.host.Path(root.Library))
	if !errors.Is(err, nvml.ErrLibraryNotFound) {
		o.loaded = root.Library
	}
	if err != nil {
		return root, nil, errNoAnswer(root, err)
	}
	return root, session, nil
}

// Open opens the driver at path, or the one that is found if path is empty, for
// another use than a Follower's. The session must be closed.
func Open(host driverroot.Host, path string) (driverroot.Root, *nvml.Session, error) {
	return NewOpener(host, path).open()
}

func errNoAnswer(root driverroot.Root, err error) error {
	return fmt.Errorf("the driver at %s doesn't answer: %w", root.Path, err)
}
