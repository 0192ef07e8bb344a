"""The door to the command line: `python main.py fit -c configs/gtpo.yaml …`."""

from gtpo_lightning.cli import main

if __name__ == "__main__":
    main()
