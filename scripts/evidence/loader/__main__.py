from scripts.evidence.loader.measurement import main

if __name__ == "__main__":
    main()
